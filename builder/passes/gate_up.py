"""Merges an MLP's gate and up projections into one matrix product."""

from __future__ import annotations

from .merge import MergeProducts


class FuseGateUp(MergeProducts):
    """Merges the two `MatMul`s of one input behind `SwiGLU(g, u)` or `Mul(activation(g), u)`; see MergeProducts."""

    operators = frozenset({"SwiGLU", "Mul"})
    through = frozenset({"Add", "Gelu", "Relu"})
    count = 2
