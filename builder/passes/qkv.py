"""Merges the projections of query, key and value into one matrix product."""

from __future__ import annotations

from .merge import MergeProducts

_NORMS = {"RMSNormalization", "LayerNormalization"}


class FuseQKV(MergeProducts):
    """Merges the three `MatMul`s behind a `TreeAttention`'s query, key and value, with biases; see MergeProducts.

    Pre: the graph has a TreeAttention.
    """

    needs = ("TreeAttention",)
    operators = frozenset({"TreeAttention"})
    through = frozenset({"Add", "Reshape", "Transpose", "RotaryEmbedding", "Clip"} | _NORMS)
    count = 3
