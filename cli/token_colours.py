"""Texts whose tokens are coloured by how they came to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from specbuild.runtime import Result
from specbuild.runtime.requests.tokenizer import Tokenizer


def coloured(text: str, token_ids: Sequence[int], drafted: Sequence[bool], tokenizer: Tokenizer) -> str:
    """Return the text with its accepted draft tokens in green.

    From a token on that is not in the text as a whole, such as half a character, the rest is one piece.
    """
    pieces, at = [], 0
    for index, token in enumerate(token_ids):
        piece = tokenizer.token_text(token)
        if not text.startswith(piece, at):
            break
        pieces.append(_piece(piece, drafted[index]))
        at += len(piece)
    else:
        index = len(token_ids)
    return "".join(pieces) + _piece(text[at:], index < len(drafted) and all(drafted[index:]))


def legend(results: Iterable[Result]) -> str:
    """Return the line that says what the colours mean, and how many tokens have each."""
    flags = [flag for result in results for flag in result.drafted]
    counts = [result.metrics.speculative_decoding for result in results if result.metrics]
    rejected = sum(each.num_draft_tokens - each.num_accepted_draft_tokens for each in counts)
    accepted, own = sum(flags), len(flags) - sum(flags)
    return f"tokens: {accepted} {_piece('accepted', True)} drafts, {own} of the target's own, {rejected} rejected"


def _piece(text: str, accepted: bool) -> str:
    return click.style(text, fg="green", bold=True) if accepted and text else text
