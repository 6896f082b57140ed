"""Moves RoPE into attention, which then takes unrotated queries and keys, and the rotary tables."""

from __future__ import annotations

import onnx_ir as ir

from .pattern import FusionPass, insert, producer, replace


class FuseRotary(FusionPass):
    """Moves the RotaryEmbedding of query and key into `TreeAttention`, which then rotates them itself.

    `TreeAttention(RotaryEmbedding(q, cos[p], sin[p]), RotaryEmbedding(k, …), …)` becomes
    `TreeAttention(q, k, …, cos, sin)`.
    Pre: the graph has an input position_ids. Post: no attention takes queries and keys rotated by the same tables.
    """

    needs = ("position_ids",)
    left = "does not rotate by itself"

    def find(self, node: ir.Node) -> tuple[ir.Value, ir.Value, tuple[ir.Value, ...]] | None:
        """Return unrotated query and key, and the tables that rotate both; None if a node does not match."""
        if node.op_type != "TreeAttention":
            return None
        rotations = [producer(value, "RotaryEmbedding") for value in node.inputs[:2]]
        if not all(rotations):
            return None
        found = [_tables(rotation, node.inputs[5]) for rotation in rotations if rotation]
        if found[0] is None or found[0] != found[1]:
            return None
        query, key = (rotation.inputs[0] for rotation in rotations if rotation)
        assert query is not None
        assert key is not None
        return query, key, found[0]

    def rewrite(self, graph: ir.Graph, node: ir.Node, found: tuple[ir.Value, ir.Value, tuple[ir.Value, ...]]) -> None:
        """See the class."""
        query, key, tables = found
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        inputs = [query, key, *node.inputs[2:9], *tables, *node.inputs[11:]]
        outputs = [ir.Value(name=old.name, shape=old.shape, type=old.type) for old in node.outputs]
        insert(node, "TreeAttention", inputs, node.domain, attributes, outputs)
        for old, new in zip(node.outputs, outputs, strict=True):
            replace(old, new)
        graph.remove(node, safe=True)


def _tables(rotation: ir.Node, positions: ir.Value | None) -> tuple[ir.Value, ...] | None:
    """Return the tables cos and sin if they are looked up by the positions, else None."""
    lookups = [producer(value, "Gather") for value in rotation.inputs[1:3]]
    tables = tuple(lookup.inputs[0] for lookup in lookups if lookup and lookup.inputs[1] is positions)
    plain = "interleaved" not in rotation.attributes or not rotation.attributes["interleaved"].as_int()
    return tables if plain and len(tables) == 2 and all(t and t.is_initializer() for t in tables) else None  # type: ignore[return-value]
