"""FuseRotary hands attention unrotated queries and keys and the tables, where both are rotated by the same ones."""

from __future__ import annotations

import pytest
from graphs import SWIGLU, apply, parse
from onnx_ir.passes import PostconditionError, PreconditionError

from specbuild.builder.passes import clean
from specbuild.builder.passes.rotary import FuseRotary

ROTARY = """g (float[B, 2, N, 4] q, float[B, 1, N, 4] k, float[B, 1, N, 4] v, float[B, 1, S, 4] pk,
    float[B, 1, S, 4] pv, int64[B, N] position_ids, int32[B, M] parents, int32[B] cache_len, int32[B] tree_offset)
    => (float[B, N, 8] y, float[B, 1, S, 4] present_key, float[B, 1, S, 4] present_value)
    <float[3, 2] cos = {1, 0, 1, 0, 1, 0}, float[3, 2] sin = {0, 1, 0, 1, 0, 1}> {
    c = Gather (cos, position_ids)
    s = Gather (sin, position_ids)
    rq = RotaryEmbedding (q, c, s)
    rk = RotaryEmbedding (k, c, s)
    y, present_key, present_value = specbuild.TreeAttention <scale = 0.5, window = 3> (
        rq, rk, v, pk, pv, position_ids, parents, cache_len, tree_offset)
}"""
ONLY_QUERY = ROTARY.replace("rk = RotaryEmbedding (k, c, s)", "rk = Identity (k)")
INTERLEAVED = ROTARY.replace("RotaryEmbedding (", "RotaryEmbedding <interleaved = 1> (")
OTHER_POSITIONS = ROTARY.replace("int64[B, N] position_ids", "int64[B, N] position_ids, int64[B, N] other").replace(
    "c = Gather (cos, position_ids)", "c = Gather (cos, other)"
)


@pytest.mark.parametrize(
    ("text", "matched"),
    [(ROTARY, 1), (ONLY_QUERY, 0), (INTERLEAVED, 0), (OTHER_POSITIONS, 0)],
    ids=["both", "only the query", "interleaved", "other positions"],
)
def test_matches_where_both_are_rotated_by_halves_at_the_nodes_positions(text: str, matched: int) -> None:
    assert apply(FuseRotary(), text)[0] == matched


def test_attention_takes_the_tables() -> None:
    _, model = apply(FuseRotary(), ROTARY)
    clean(model)
    (node,) = model.graph
    names = [value.name for value in node.inputs if value]
    assert names == ["q", "k", "v", "pk", "pv", "position_ids", "parents", "cache_len", "tree_offset", "cos", "sin"]
    assert (node.attributes["scale"].as_float(), node.attributes["window"].as_int()) == (0.5, 3)
    assert [value.name for value in model.graph.outputs] == ["y", "present_key", "present_value"]


def test_needs_positions() -> None:
    with pytest.raises(PreconditionError, match="position_ids"):
        FuseRotary()(parse(SWIGLU))


def test_promises_that_attention_rotates_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FuseRotary, "rewrite", lambda *_: None)
    with pytest.raises(PostconditionError, match="does not rotate by itself"):
        FuseRotary()(parse(ROTARY))
