"""FuseSwiGLU finds silu(gate) · up, either way round, and keeps gate and up apart."""

from __future__ import annotations

import pytest
from graphs import GATHER, RESHAPE, SWIGLU, apply, assert_same, kinds, normal, parse

from specbuild.builder.passes import clean
from specbuild.builder.passes.swiglu import FuseSwiGLU

TURNED = SWIGLU.replace("(x, s)", "(s, x)").replace("(silu, u)", "(u, silu)")
GLU = SWIGLU.replace("Mul (x, s)", "Mul (u, s)")  # a gate without its own factor
SHARED = SWIGLU.replace("=> (float[B, N, 4] y)", "=> (float[B, N, 4] y, float[B, N, 4] silu)")
ADDED = SHARED.replace("Mul (silu, u)", "Add (silu, u)")


@pytest.mark.parametrize(
    ("text", "matched"),
    [(SWIGLU, 1), (TURNED, 1), (GLU, 0), (ADDED, 0), (GATHER, 0), (RESHAPE, 0)],
    ids=["plain", "turned", "glu", "added", "gather", "reshape"],
)
def test_matches_a_gate_times_its_sigmoid_times_up(text: str, matched: int) -> None:
    assert apply(FuseSwiGLU(), text)[0] == matched


def test_a_gate_without_its_own_factor_is_left_alone() -> None:
    _, model = apply(FuseSwiGLU(), GLU)
    assert kinds(model) == kinds(parse(GLU))


def test_gate_and_up_are_kept_apart() -> None:
    _, model = apply(FuseSwiGLU(), SWIGLU)
    clean(model)
    (node,) = model.graph
    assert [value.name for value in node.inputs if value] == ["x", "u"]
    assert (node.domain, node.outputs[0].name) == ("specbuild", "y")


@pytest.mark.parametrize("text", [SWIGLU, TURNED, SHARED], ids=["plain", "turned", "silu is an output"])
def test_computes_the_same(text: str) -> None:
    matched, model = apply(FuseSwiGLU(), text)
    clean(model)
    assert matched == 1
    assert_same(model, text, {"x": normal(2, 5, 4), "u": normal(2, 5, 4)[::-1]})


def test_a_silu_that_is_read_twice_stays() -> None:
    text = SWIGLU.replace("y = Mul (silu, u)", "y = Mul (silu, silu)")
    assert apply(FuseSwiGLU(), text)[0] == 0
