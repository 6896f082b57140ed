"""Lowers the portable graph to standard operators (opset 24), for backends that have a fused attention of their own.

The nodes of B sequences are padded to `[B, N]`. `TreeAttention` becomes RotaryEmbedding, TensorScatter into the cache
at `write_rows [B]`, and Attention over all cache rows under `mask.w bool[B, 1, N, S]`, which encodes the tree and the
window of w positions (0: none). Tokens, positions and rows are int32, as kernels write them. Activations, weights and
caches share one 16- or 32-bit type; norms are computed in float32, and logits are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specbuild.builder.passes import clean
from specbuild.builder.passes.pattern import constant, dims, insert, recipe, replace
from specbuild.runtime.errors import OptionError

from .quantized import block_lookup, block_product, scaled_product

OPSET = 24
INPUTS = {
    "tokens": "input_ids",
    "positions": "position_ids",
    "logit_nodes": "logit_nodes",
    "write_rows": "write_rows",
    "mask": "mask.{window}",
    "past_key": "past_key.{layer}",
    "past_value": "past_value.{layer}",
}
OUTPUTS = {"logits": "logits", "present_key": "present_key.{layer}", "present_value": "present_value.{layer}"}
DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
Lowerings = Mapping[str, Callable[[ir.Node], list[ir.Value]]]  # by operator: what the outputs of a node become


def lower(portable: ir.Model, precision: str, capacity: int) -> ir.Model:
    """Return a new model; the portable one is not changed.

    The numbers of sequences, nodes and logits stay dynamic.

    Args:
        portable: The fused portable graph.
        precision: The type of activations, a key of DTYPES.
        capacity: Cache rows per slot.

    Raises:
        OptionError: A weight is too large for the type.
    """
    model, dtype = portable.clone(), DTYPES[precision]
    graph = model.graph
    by_name = {value.name: value for value in graph.inputs}
    batch_of_tokens(graph)
    attentions = [node for node in graph if node.op_type == "TreeAttention"]
    write_rows = graph_input("write_rows", ir.DataType.INT64, ["batch"])
    masks = {
        window: graph_input(f"mask.{window}", ir.DataType.BOOL, ["batch", 1, "nodes", capacity])
        for window in sorted({window_of(node) for node in attentions})
    }
    for layer, node in enumerate(attentions):
        _lower_attention(node, layer, by_name["position_ids"], write_rows, masks[window_of(node)], capacity)
    expand(graph)
    convert(graph, dtype)
    narrow(graph, [by_name["input_ids"], by_name["position_ids"], by_name["logit_nodes"], write_rows])
    dropped = ("parents", "cache_len", "tree_offset")
    kept = [value for value in graph.inputs if value.name not in dropped]
    graph.inputs.clear()
    graph.inputs.extend([*kept[:3], write_rows, *masks.values(), *kept[3:]])
    clean(model)
    graph.opset_imports[""] = OPSET
    return model


def batch_of_tokens(graph: ir.Graph) -> None:
    """Let nodes that read the batch size from other inputs read it from the tokens, so that those may be removed."""
    for node in graph:
        if node.op_type == "Shape" and node.inputs[0].is_graph_input() and dims(node.inputs[0])[0] == "batch":  # type: ignore
            node.replace_input_with(0, graph.inputs[0])


def graph_input(name: str, dtype: ir.DataType, shape: list[str | int]) -> ir.Value:
    """Return a new input, which is not in a graph yet."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def window_of(attention: ir.Node) -> int:
    """Return how many positions a node of this attention sees; 0: all; −c: those of its chunk of c positions."""
    return attention.attributes["window"].as_int()


def _lower_attention(
    node: ir.Node, layer: int, positions: ir.Value, rows: ir.Value, mask: ir.Value, capacity: int
) -> None:
    """Replace `TreeAttention` by operators that rotate, append to the cache and attend, named by their layer."""
    query, key, value, past_key, past_value, *_ = node.inputs
    tables, size = list(node.inputs[9:11]), int(dims(query)[3])  # type: ignore[index]
    for past in (past_key, past_value):
        past.shape = ir.Shape(["batch", dims(key)[1], capacity, size])  # type: ignore[index, union-attr]
    if tables:
        width = 2 * int(dims(tables[0])[1])  # type: ignore[index]
        partial = {"rotary_embedding_dim": 0 if width == size else width}
        rotated = [insert(node, "RotaryEmbedding", [x, *tables, positions], attributes=partial) for x in (query, key)]
        query, key = (named(x, f"rotary.{layer}.{role}") for x, role in zip(rotated, ("query", "key"), strict=True))
    linear = {"axis": 2, "mode": "linear"}
    present = [
        named(insert(node, "TensorScatter", [past, new, rows], attributes=linear), f"cache.{layer}.{role}")
        for role, past, new in (("key", past_key, key), ("value", past_value, value))
    ]
    scale, softcap = (node.attributes[name].as_float() for name in ("scale", "softcap"))
    if softcap:
        attended = _capped_attention(node, [query, *present, mask], scale, softcap)
    else:
        attended = insert(node, "Attention", [query, *present, mask], attributes={"scale": scale})
    named(attended, f"attention.{layer}")
    turned = insert(node, "Transpose", attended.outputs, attributes={"perm": [0, 2, 1, 3]})
    for old, new in zip(node.outputs, [turned.outputs[0], *present], strict=True):
        replace(old, new)
    node.graph.remove(node, safe=True)  # type: ignore[union-attr]


def _capped_attention(node: ir.Node, inputs: Sequence[ir.Value | None], scale: float, softcap: float) -> ir.Node:
    """Return attention with a softcap, written out because TensorRT's attention has none."""
    query, key, value, mask = inputs
    (_, heads, _, size), (_, kv_heads, capacity, _) = dims(node.inputs[0]), dims(node.inputs[3])  # type: ignore[misc]
    graph = node.graph
    assert graph is not None

    def then(op_type: str, *values: ir.Value | None, **attributes: Any) -> ir.Value:
        return insert(node, op_type, values, attributes=attributes).outputs[0]

    def rows(x: ir.Value, count: int | str, width: int | str) -> ir.Value:
        name, shape = f"attended_{count}_{width}", np.array([0, count, -1, width], dtype=np.int64)
        return then("Reshape", x, constant(graph, name, shape))

    def number(name: str, x: float) -> ir.Value:
        return constant(graph, f"{name}_{x:g}", np.array(x, dtype=np.float32))

    assert query is not None
    scores = then("MatMul", rows(query, kv_heads, size), then("Transpose", key, perm=[0, 1, 3, 2]))
    capped = then("Tanh", then("Mul", rows(scores, heads, capacity), number("scale", scale / softcap)))
    masked = then("Where", mask, then("Mul", capped, number("softcap", softcap)), number("hidden", -np.inf))
    weights = then("Softmax", masked, axis=-1)
    summed = then("MatMul", rows(weights, kv_heads, capacity), value)
    return rows(summed, heads, size).producer()  # type: ignore[return-value]


def named(node: ir.Node, name: str) -> ir.Value:
    """Name a node, for a compiler's messages and list of layers, and return its output."""
    node.name = name
    return node.outputs[0]


def residual_norm(node: ir.Node) -> list[ir.Value]:
    """Lower AddRMSNorm to a sum and the norm of it."""
    total = insert(node, "Add", node.inputs[:2]).outputs[0]
    attributes = {"axis": -1, "epsilon": node.attributes["epsilon"].as_float()}
    norm = insert(node, "RMSNormalization", [total, node.inputs[2]], attributes=attributes)
    return [norm.outputs[0], total]


def swiglu(node: ir.Node) -> list[ir.Value]:
    """Lower SwiGLU to Sigmoid and two products; ONNX Runtime's QuickGelu, silu at factor 1, is several times slower."""
    gate, up = node.inputs
    silu = insert(node, "Mul", [gate, insert(node, "Sigmoid", [gate]).outputs[0]])
    return list(insert(node, "Mul", [silu.outputs[0], up]).outputs)


def _transposed_product(node: ir.Node) -> list[ir.Value]:
    x, weight = node.inputs
    turned = insert(node, "Transpose", [weight], attributes={"perm": [1, 0]})
    return list(insert(node, "MatMul", [x, turned.outputs[0]]).outputs)


def _expert_product(node: ir.Node) -> list[ir.Value]:
    """Lower a product by chosen experts to one with their weights, gathered for each row."""
    x, weight, chosen = node.inputs
    graph, turned = node.graph, node.attributes["turned"].as_int()
    assert graph is not None

    def then(op_type: str, *values: ir.Value | None, **attributes: Any) -> ir.Value:
        return insert(node, op_type, values, attributes=attributes).outputs[0]

    def shape(*sizes: int) -> ir.Value:
        return constant(graph, f"experts_{'_'.join(map(str, sizes))}", np.array(sizes, dtype=np.int64))

    first, second = (int(size) for size in (dims(weight) or ())[1:])
    inner, columns = (first, second) if turned else (second, first)
    rows_of, of_experts = list(dims(x) or ()), list(dims(chosen) or ())
    experts = int(of_experts[1])
    flat = then("Reshape", chosen, shape(-1))
    many = experts > 1 and rows_of[0] == of_experts[0]
    repeated = then("Expand", then("Reshape", x, shape(-1, 1, inner)), shape(1, experts, 1)) if many else x
    row = shape(-1, 1, inner) if turned else shape(-1, inner, 1)
    rows, own = then("Reshape", repeated, row), then("Gather", weight, flat, axis=0)
    return [then("Reshape", then("MatMul", *((rows, own) if turned else (own, rows))), shape(-1, columns))]


def expand(graph: ir.Graph, lowerings: Lowerings | None = None) -> None:
    """Replace operators as `lowerings` say: by default specbuild's own, except attention, by standard ones."""
    lowerings = lowerings or _LOWERED
    for node in list(graph):
        if node.op_type in lowerings:
            for old, new in zip(node.outputs, lowerings[node.op_type](node), strict=True):
                replace(old, new)
            graph.remove(node, safe=True)


def convert(graph: ir.Graph, dtype: ir.DataType) -> None:
    """Convert weights, caches and activations to one type; logits and hidden states between models stay float32.

    A weight that is too large for the type raises OptionError when it is written.
    """
    if dtype == ir.DataType.FLOAT:
        return
    for value in list(graph.initializers.values()):
        if value.dtype == ir.DataType.FLOAT:
            assert value.const_value is not None
            make = partial(_rounded, value.const_value, str(value.name), dtype)
            value.const_value = recipe(str(value.name), dtype, value.const_value.shape.numpy(), make)
            value.type = ir.TensorType(dtype)
    for value in [*graph.inputs, *(output for node in graph for output in node.outputs)]:
        if value.dtype == ir.DataType.FLOAT:
            value.type = ir.TensorType(dtype)
    for value in [value for value in graph.inputs if value.name == "hidden_in"]:
        _cast(graph, value, dtype, ir.DataType.FLOAT)
    for value in [value for value in graph.outputs if value.name in ("logits", "hidden")]:
        last, name = value.producer(), value.name
        assert last is not None
        cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
        graph.insert_after(last, cast)
        cast.outputs[0].shape, cast.outputs[0].type = value.shape, ir.TensorType(ir.DataType.FLOAT)
        value.name, cast.outputs[0].name = None, name
        graph.outputs[list(graph.outputs).index(value)] = cast.outputs[0]


def _rounded(exact: ir.TensorProtocol, name: str, dtype: ir.DataType) -> NDArray[Any]:
    """Round numbers to a type; raise OptionError if one is too large for it."""
    numbers = exact.numpy()
    with np.errstate(over="ignore"):
        rounded = numbers.astype(dtype.numpy())
    if np.isinf(rounded).sum() > np.isinf(numbers).sum():
        raise OptionError(f"{name} has numbers too large for {dtype.name.lower()}: use bf16 or fp32")
    return rounded


def narrow(graph: ir.Graph, inputs: list[ir.Value]) -> None:
    """Make int64 inputs int32, and cast them to int64 at the graph's beginning."""
    for value in inputs:
        _cast(graph, value, ir.DataType.INT64, ir.DataType.INT32)


def _cast(graph: ir.Graph, value: ir.Value, dtype: ir.DataType, given: ir.DataType) -> None:
    """Change an input's type to `given`, and cast it to the `dtype` that its users take at the graph's beginning."""
    uses = list(value.uses())
    cast = insert(graph[0], "Cast", [value], attributes={"to": dtype})
    cast.outputs[0].shape, cast.outputs[0].type = value.shape, ir.TensorType(dtype)
    for use in uses:
        use.node.replace_input_with(use.idx, cast.outputs[0])
    value.type = ir.TensorType(given)


_LOWERED = {
    "AddRMSNorm": residual_norm,
    "SwiGLU": swiglu,
    "MatMulNT": _transposed_product,
    "ExpertMatMul": _expert_product,
    "BlockMatMul": block_product,
    "BlockGather": block_lookup,
    "ScaledMatMul": scaled_product,
}
