"""Lowers `TreeAttention` for ONNX Runtime to GroupQueryAttention, in lanes.

The operator (com.microsoft) accepts several new nodes over a past for one sequence only, so attention is split into one
lane per cache slot. It applies RoPE itself where head size and rotated part are multiples of 16; elsewhere the standard
operator does. Its own window is not used: it counts cache rows, of which a tree has more than positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from specbuild.builder.passes.pattern import constant, dims, insert, permutation, producer, replace

HEAD_MULTIPLE, ROTARY_MULTIPLE = 8, 16  # GroupQueryAttention's head sizes: of all, and of those it rotates


@dataclass
class Lanes:
    """The inputs and outputs of attention in the lowered graph, most of them one per lane."""

    capacity: int
    bias: dict[int, list[ir.Value]]  # by window, one per lane
    last_row: list[ir.Value]
    positions: list[ir.Value]
    rows: ir.Value  # the node of each row of attention
    nodes: ir.Value  # the row of each node
    sizes: ir.Value | None  # how many rows each lane has; None for one lane
    caches: list[ir.Value] = field(default_factory=list)
    presents: list[ir.Value] = field(default_factory=list)

    @property
    def shared(self) -> list[ir.Value]:
        """The inputs that say which node and which lane each row of attention belongs to."""
        return [self.rows, self.nodes, *([self.sizes] if self.sizes else [])]


def cache_width(head_dim: int) -> int:
    """Return the size of a head in the cache, padded to a multiple of 8 as GroupQueryAttention requires."""
    return -(-head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE


def window_of(attention: ir.Node) -> int:
    """Return how many positions a node of this attention sees; 0: all."""
    return attention.attributes["window"].as_int()


def make_lanes(first: ir.Node, positions: ir.Value, batch_size: int, capacity: int, windows: list[int]) -> Lanes:
    """Make the inputs that all attentions share, and split the positions by lane in front of the first attention.

    Args:
        first: The first attention.
        positions: The positions of all nodes.
        batch_size: How many lanes there are.
        capacity: Cache rows per lane.
        windows: The windows that attentions have, in positions; 0: all.
    """

    def value(name: str, dtype: ir.DataType, shape: list[str | int]) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))

    slots = range(batch_size)
    rows = value("attention_rows", ir.DataType.INT64, ["attention_rows"])
    lanes = Lanes(
        capacity=capacity,
        bias={
            window: [
                value(f"bias.{window}.{slot}", ir.DataType.FLOAT, [1, 1, f"nodes.{slot}", capacity]) for slot in slots
            ]
            for window in windows
        },
        last_row=[value(f"last_row.{slot}", ir.DataType.INT32, [1]) for slot in slots],
        positions=[_gather(first, positions, rows)],
        rows=rows,
        nodes=value("node_rows", ir.DataType.INT64, ["nodes"]),
        sizes=None,
    )
    if batch_size > 1:
        lanes.sizes = value("lane_sizes", ir.DataType.INT64, [batch_size])
        lanes.positions = _split(first, lanes.positions[0], lanes.sizes, batch_size)
    return lanes


def _gather(before: ir.Node, value: ir.Value, rows: ir.Value) -> ir.Value:
    return insert(before, "Gather", [value, rows], attributes={"axis": 1}).outputs[0]


def _split(before: ir.Node, value: ir.Value, sizes: ir.Value, count: int) -> list[ir.Value]:
    return list(insert(before, "Split", [value, sizes], attributes={"axis": 1}, outputs=count).outputs)


def lower_attention(graph: ir.Graph, node: ir.Node, layer: int, lanes: Lanes) -> None:
    """Replace `TreeAttention` by one GroupQueryAttention per lane, which applies RoPE itself where it can."""
    heads, kv_heads, size = dims(node.inputs[0])[1], dims(node.inputs[1])[1], dims(node.inputs[0])[3]  # type: ignore[index]
    padded = cache_width(int(size))
    tables = list(node.inputs[9:11])
    query, key, value = node.inputs[:3]
    if tables and (int(size) % ROTARY_MULTIPLE or 2 * int(dims(tables[0])[1]) % ROTARY_MULTIPLE):  # type: ignore[index]
        query, key = (_rotate(node, x, tables) for x in (query, key))
        tables = []
    packed = _packed(node, [_rows(graph, node, x, padded) for x in (query, key, value)])
    packed = [_gather(node, x, lanes.rows) for x in packed]
    split = [_split(node, x, lanes.sizes, len(lanes.last_row)) if lanes.sizes else [x] for x in packed]
    rotation = [[*tables, positions] if tables else [None] * 3 for positions in lanes.positions]
    total = constant(graph, "capacity", np.array(lanes.capacity, dtype=np.int32))
    attributes = {
        "num_heads": int(heads),
        "kv_num_heads": int(kv_heads),
        "do_rotary": int(bool(tables)),
        "scale": node.attributes["scale"].as_float(),
        "softcap": node.attributes["softcap"].as_float(),
    }
    outputs = []
    for slot, rows in enumerate(zip(*split, strict=True)):
        past, present = [], []
        for kind in ("key", "value"):
            shape, dtype = ir.Shape([1, kv_heads, lanes.capacity, padded]), ir.TensorType(ir.DataType.FLOAT)
            past.append(ir.Value(name=f"past_{kind}.{layer}.{slot}", shape=shape, type=dtype))
            present.append(ir.Value(name=f"present_{kind}.{layer}.{slot}", shape=shape, type=dtype))
        query_key_value = [*rows, *[None] * (3 - len(rows))]
        bias = lanes.bias[window_of(node)][slot]
        inputs = [*query_key_value, *past, lanes.last_row[slot], total, *rotation[slot], bias]
        out = ir.Value()
        insert(node, "GroupQueryAttention", inputs, "com.microsoft", attributes, [out, *present])
        outputs.append(out)
        lanes.caches += past
        lanes.presents += present
    out = insert(node, "Concat", outputs, attributes={"axis": 1}).outputs[0] if len(outputs) > 1 else outputs[0]
    out = _gather(node, out, lanes.nodes)
    for old in node.outputs[1:]:
        while old.is_graph_output():
            graph.outputs.remove(old)
    if padded != size:
        out = _cut(graph, node, out, int(heads), int(size), padded)
    _hand_over(graph, node.outputs[0], out)
    graph.remove(node, safe=True)


def _hand_over(graph: ir.Graph, heads: ir.Value, rows: ir.Value) -> None:
    """Give the result `[B, N, H·D]` to users that reshape it to that; reshape it to `[B, N, H, D]` for the others."""
    for reshape in [use.node for use in heads.uses()]:
        if reshape.op_type == "Reshape" and len(dims(reshape.outputs[0]) or ()) == 3:
            replace(reshape.outputs[0], rows)
            graph.remove(reshape, safe=True)
    if heads.uses():
        shape = _shape(graph, *(int(dim) for dim in (dims(heads) or [])[2:]))
        replace(heads, insert(heads.producer(), "Reshape", [rows, shape]).outputs[0])  # type: ignore[arg-type]


def _rotate(before: ir.Node, value: ir.Value | None, tables: list[ir.Value | None]) -> ir.Value:
    """Rotate `[B, H, N, D]` with the standard operator."""
    cos, sin = (insert(before, "Gather", [table, before.inputs[5]]).outputs[0] for table in tables)
    size, width = dims(value)[3], 2 * int(dims(tables[0])[1])  # type: ignore[index]
    rotated = insert(
        before,
        "RotaryEmbedding",
        [value, cos, sin],
        attributes={"rotary_embedding_dim": 0 if width == size else width},
    ).outputs[0]
    assert value is not None
    rotated.shape, rotated.type = value.shape, value.type
    return rotated


def _packed(node: ir.Node, rows: list[ir.Value]) -> list[ir.Value]:
    """Return the merged projection if query, key and value are a Split of it: the operator takes it whole."""
    split = producer(rows[0], "Split")
    if split is not None and all(a is b for a, b in zip(split.outputs, rows, strict=True)):
        return [split.inputs[0]]  # type: ignore[list-item]
    return rows


def _rows(graph: ir.Graph, before: ir.Node, value: ir.Value | None, padded: int) -> ir.Value:
    """Return `[B, H, N, D]` as `[B, N, H·D]` for GroupQueryAttention: the projection's own output where possible."""
    assert value is not None
    heads, size = dims(value)[1], dims(value)[3]  # type: ignore[index]
    transpose = producer(value, "Transpose")
    if transpose is not None and permutation(transpose) == (0, 2, 1, 3):
        value = transpose.inputs[0]
    else:
        value = insert(before, "Transpose", [value], attributes={"perm": [0, 2, 1, 3]}).outputs[0]
    reshape = producer(value, "Reshape")
    if padded == size and reshape is not None and len(dims(reshape.inputs[0]) or []) == 3:
        return reshape.inputs[0]  # type: ignore[return-value]
    if padded > int(size):
        pads = constant(graph, f"pad_{padded - int(size)}", np.array([0] * 7 + [padded - int(size)], dtype=np.int64))
        value = insert(before, "Pad", [value, pads]).outputs[0]
    return insert(before, "Reshape", [value, _shape(graph, int(heads) * padded)]).outputs[0]


def _cut(graph: ir.Graph, before: ir.Node, value: ir.Value, heads: int, size: int, padded: int) -> ir.Value:
    """Remove the padding of heads from `[B, N, H·D]`."""
    value = insert(before, "Reshape", [value, _shape(graph, heads, padded)]).outputs[0]
    bounds = [constant(graph, f"index_{number}", np.array([number], dtype=np.int64)) for number in (0, size, 3)]
    value = insert(before, "Slice", [value, *bounds]).outputs[0]
    return insert(before, "Reshape", [value, _shape(graph, heads * size)]).outputs[0]


def _shape(graph: ir.Graph, *sizes: int) -> ir.Value:
    """Return a shape for Reshape that keeps batch and nodes."""
    return constant(graph, "shape_" + "_".join(map(str, sizes)), np.array([0, 0, *sizes], dtype=np.int64))
