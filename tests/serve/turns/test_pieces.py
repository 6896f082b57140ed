"""Pieces make a turn; what may begin a marker is held."""

from __future__ import annotations

import pytest

from specbuild.serve.turns.pieces import Call, Piece, Turn, held


def test_pieces_make_a_turn() -> None:
    pieces = [Piece("reasoning", "so"), Piece("content", "a"), Piece("call", "f"), Piece("call", "g", 1)]
    turn = Turn.of([*pieces, Piece("arguments", "{", 1), Piece("arguments", "{}", 0), Piece("arguments", "}", 1)])
    assert turn == Turn("so", "a", [Call("f", "{}"), Call("g", "{}")])


@pytest.mark.parametrize(
    ("text", "count"), [("", 0), ("a<", 1), ("a<to", 3), ("<tool>", 0), ("<tool", 5), ("a[", 1), ("<<", 1)]
)
def test_what_may_begin_a_marker_is_held(text: str, count: int) -> None:
    assert held(text, ("<tool>", "[x]")) == count
