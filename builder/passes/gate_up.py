"""An MLP's gate and up projections in one matrix product."""

from __future__ import annotations

from .merge import MergeProducts


class FuseGateUp(MergeProducts):
    """The two `MatMul`s of one input behind a `SwiGLU`, or behind `Mul(activation(g), u)`; see MergeProducts."""

    operators = frozenset({"SwiGLU", "Mul"})
    through = frozenset({"Add", "Gelu", "Relu"})
    count = 2
