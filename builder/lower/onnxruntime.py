"""The portable graph for ONNX Runtime on a CPU: GroupQueryAttention in lanes, its fused norms and activations.

The lowered graph takes all sequences' nodes as one flat list `[1, T]`. GroupQueryAttention (com.microsoft) accepts
several new nodes over a past for one sequence only, so attention is split into one lane per cache slot; everything
else is computed on T rows at once, without padding. A lane's nodes lie at `lane_sizes`; `bias.j [1, 1, n, S]` holds
the tree, 0 or −inf per cache row; `last_row.j` is the last cache row the lane writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ...runtime.errors import CheckpointError
from ..passes import clean
from ..passes.pattern import constant, dims, insert, permutation, producer, replace

_MS = "com.microsoft"
HEAD_MULTIPLE = 16
INPUTS = {
    "tokens": "input_ids",
    "positions": "position_ids",
    "logit_nodes": "logit_nodes",
    "lane_sizes": "lane_sizes",
    "tree_bias": "bias.{slot}",
    "last_row": "last_row.{slot}",
    "past_key": "past_key.{layer}.{slot}",
    "past_value": "past_value.{layer}.{slot}",
}
OUTPUTS = {
    "logits": "logits",
    "present_key": "present_key.{layer}.{slot}",
    "present_value": "present_value.{layer}.{slot}",
}


@dataclass
class _Lanes:
    """The inputs and outputs that exist once per lane."""

    bias: list[ir.Value]
    last_row: list[ir.Value]
    positions: list[ir.Value]
    sizes: ir.Value | None
    caches: list[ir.Value] = field(default_factory=list)
    presents: list[ir.Value] = field(default_factory=list)


def lower(portable: ir.Model, batch_size: int, capacity: int) -> ir.Model:
    """A new model for `batch_size` lanes over caches of `capacity` rows; the portable one is left as it was.

    Raises CheckpointError for a graph whose attention this backend cannot express.
    """
    model = portable.clone()
    graph = model.graph
    by_name = {value.name: value for value in graph.inputs}
    positions = by_name["position_ids"]
    attentions = [node for node in graph if node.op_type == "TreeAttention"]
    lanes = _make_lanes(attentions[0], positions, batch_size, capacity)
    for layer, node in enumerate(attentions):
        _lower_attention(graph, node, layer, lanes, capacity)
    for node in list(graph):
        _lower_norm(graph, node)
        _lower_swiglu(graph, node)
        _lower_tied_head(graph, node)
    (logits,) = (value for value in graph.outputs if value.name == "logits")
    flat = [by_name["input_ids"], positions, by_name["logit_nodes"]]
    for value in (by_name["input_ids"], positions):
        value.shape = ir.Shape([1, "nodes"])
    logits.shape = ir.Shape([1, "logit_nodes", dims(logits)[-1]])  # type: ignore[index]
    graph.inputs.clear()
    graph.inputs.extend(flat + ([lanes.sizes] if lanes.sizes else []) + lanes.bias + lanes.last_row + lanes.caches)
    graph.outputs.clear()
    graph.outputs.extend([logits, *lanes.presents])
    clean(model)
    for node in graph:  # shapes of the portable graph: ONNX Runtime infers its own
        for output in node.outputs:
            if not output.is_graph_output():
                output.shape = None
    return model


def _make_lanes(first: ir.Node, positions: ir.Value, batch_size: int, capacity: int) -> _Lanes:
    def value(name: str, dtype: ir.DataType, shape: list[str | int]) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))

    slots = range(batch_size)
    lanes = _Lanes(
        bias=[value(f"bias.{slot}", ir.DataType.FLOAT, [1, 1, f"nodes.{slot}", capacity]) for slot in slots],
        last_row=[value(f"last_row.{slot}", ir.DataType.INT32, [1]) for slot in slots],
        positions=[positions],
        sizes=None,
    )
    if batch_size > 1:
        lanes.sizes = value("lane_sizes", ir.DataType.INT64, [batch_size])
        lanes.positions = _split(first, positions, lanes.sizes, batch_size)
    return lanes


def _split(before: ir.Node, value: ir.Value, sizes: ir.Value, count: int) -> list[ir.Value]:
    return list(insert(before, "Split", [value, sizes], attributes={"axis": 1}, outputs=count).outputs)


def _lower_attention(graph: ir.Graph, node: ir.Node, layer: int, lanes: _Lanes, capacity: int) -> None:
    """`TreeAttention(Rotary(q), Rotary(k), v, …)` becomes one GroupQueryAttention per lane, which rotates by itself."""
    query, key = _unrotate(node, node.inputs[0]), _unrotate(node, node.inputs[1])
    cos, sin = query[1:]
    heads, kv_heads, size = dims(node.inputs[0])[1], dims(node.inputs[1])[1], dims(node.inputs[0])[3]  # type: ignore[index]
    if int(size) % HEAD_MULTIPLE:
        raise CheckpointError(
            f"the model has heads of size {size}: ONNX Runtime's attention takes multiples of {HEAD_MULTIPLE}"
        )
    packed = [_rows(graph, node, value) for value in (query[0], key[0], node.inputs[2])]
    split = [_split(node, v, lanes.sizes, len(lanes.bias)) if lanes.sizes else [v] for v in packed]
    total = constant(graph, "capacity", np.array(capacity, dtype=np.int32))
    outputs = []
    for slot, (q, k, v) in enumerate(zip(*split, strict=True)):
        past, present = [], []
        for kind in ("key", "value"):
            shape, dtype = ir.Shape([1, kv_heads, capacity, size]), ir.TensorType(ir.DataType.FLOAT)
            past.append(ir.Value(name=f"past_{kind}.{layer}.{slot}", shape=shape, type=dtype))
            present.append(ir.Value(name=f"present_{kind}.{layer}.{slot}", shape=shape, type=dtype))
        inputs = [q, k, v, *past, lanes.last_row[slot], total, cos, sin, lanes.positions[slot], lanes.bias[slot]]
        attributes: dict[str, int | float | str | list[int]] = {
            "num_heads": int(heads),
            "kv_num_heads": int(kv_heads),
            "do_rotary": 1,
            "scale": node.attributes["scale"].as_float(),
        }
        out = ir.Value()
        insert(node, "GroupQueryAttention", inputs, _MS, attributes, [out, *present])
        outputs.append(out)
        lanes.caches += past
        lanes.presents += present
    if len(outputs) > 1:
        outputs = list(insert(node, "Concat", outputs, attributes={"axis": 1}).outputs)
    for old in node.outputs[1:]:
        while old.is_graph_output():
            graph.outputs.remove(old)
    replace(node.outputs[0], outputs[0])
    graph.remove(node, safe=True)


def _unrotate(attention: ir.Node, value: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value]:
    """What a RotaryEmbedding rotates, and the tables its cosines and sines are looked up in."""
    rotary = producer(value, "RotaryEmbedding")
    tables = [producer(v, "Gather") for v in rotary.inputs[1:3]] if rotary else []
    if rotary is None or not all(table is not None and table.inputs[0].is_initializer() for table in tables):  # type: ignore[union-attr]
        raise CheckpointError(f"{attention.name}: the ONNX Runtime backend needs rotary positions from a table")
    cos, sin = (table.inputs[0] for table in tables)  # type: ignore[union-attr]
    return rotary.inputs[0], cos, sin  # type: ignore[return-value]


def _rows(graph: ir.Graph, before: ir.Node, value: ir.Value | None) -> ir.Value:
    """`[B, H, N, D]` as GroupQueryAttention wants it, `[B, N, H·D]`: the projection's own output where it is one."""
    assert value is not None
    heads, size = dims(value)[1], dims(value)[3]  # type: ignore[index]
    transpose = producer(value, "Transpose")
    if transpose is not None and permutation(transpose) == (0, 2, 1, 3):
        value = transpose.inputs[0]
    else:
        value = insert(before, "Transpose", [value], attributes={"perm": [0, 2, 1, 3]}).outputs[0]
    reshape = producer(value, "Reshape")
    if reshape is not None and len(dims(reshape.inputs[0]) or []) == 3:
        return reshape.inputs[0]  # type: ignore[return-value]
    width = int(heads) * int(size)
    shape = constant(graph, f"shape_{width}", np.array([0, 0, width], dtype=np.int64))
    return insert(before, "Reshape", [value, shape]).outputs[0]


def _lower_norm(graph: ir.Graph, node: ir.Node) -> None:
    """RMSNormalization becomes SimplifiedLayerNormalization, ONNX Runtime's own kernel for it."""
    if node.op_type == "RMSNormalization":
        attributes = {"axis": -1, "epsilon": node.attributes["epsilon"].as_float(), "stash_type": 1}
        new = insert(node, "SimplifiedLayerNormalization", node.inputs, attributes=attributes)  # type: ignore[arg-type]
        replace(node.outputs[0], new.outputs[0])
        graph.remove(node, safe=True)


def _lower_swiglu(graph: ir.Graph, node: ir.Node) -> None:
    """SwiGLU becomes QuickGelu with factor 1, which is silu, and a product."""
    if node.op_type == "SwiGLU":
        silu = insert(node, "QuickGelu", [node.inputs[0]], _MS, {"alpha": 1.0})
        new = insert(node, "Mul", [silu.outputs[0], node.inputs[1]])
        replace(node.outputs[0], new.outputs[0])
        graph.remove(node, safe=True)


def _lower_tied_head(graph: ir.Graph, node: ir.Node) -> None:
    """`MatMul(x, Transpose(w))` of a weight that is also the embedding reads it as it lies: no second copy on disk."""
    transpose = producer(node.inputs[1], "Transpose") if node.op_type == "MatMul" else None
    if transpose is not None and transpose.inputs[0] is not None and transpose.inputs[0].is_initializer():
        new = insert(node, "FusedMatMul", [node.inputs[0], transpose.inputs[0]], _MS, {"transB": 1})
        replace(node.outputs[0], new.outputs[0])
        graph.remove(node, safe=True)
