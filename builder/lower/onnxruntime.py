"""Lowers the portable graph for ONNX Runtime on a CPU: products and attention by specbuild's own operators.

`pack` packs weights for the operators of `plugins/cpu`; `lower` takes all sequences' nodes as one flat list `[1, T]`,
for any number of slots. Each node has a slot and a cache row; `committed[slots]` is the number of rows that all nodes
of a slot see, `visible[T, W]` says which rows from there on a node sees, and `row_positions[slots, S]` has the
positions of a slot's rows, for layers with a window. The operators write the caches in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specbuild.builder.passes import clean
from specbuild.builder.passes.pattern import (
    constant,
    dims,
    initializer,
    insert,
    numbers_of,
    permutation,
    producer,
    recipe,
    replace,
)

from .around_products import PRODUCT, fuse
from .block_form import BlockForm
from .block_panels import pack_weight, packed_codes, packed_factors, panels_of, rows_of
from .panels import COLUMNS, pack_floats
from .standard import batch_of_tokens, expand, graph_input, residual_norm, swiglu, window_of

DOMAIN = "specbuild"
INPUTS = {
    "tokens": "input_ids",
    "positions": "position_ids",
    "logit_nodes": "logit_nodes",
    "slots": "slots",
    "rows": "rows",
    "committed": "committed",
    "visible": "visible",
    "row_positions": "row_positions",
    "past_key": "keys.{layer}",
    "past_value": "values.{layer}",
}
OUTPUTS = {"logits": "logits"}
_NO_FACTORS = {"scale_bits": 32, "minimum_bits": 0}


def pack(model: ir.Model) -> None:
    """Replace every product with a weight, and lookups of the same or of quantized weights, by the operators."""
    packed = dict[str, list[ir.Value]]()
    graph = model.graph
    for node in list(graph):
        if node.op_type in ("BlockMatMul", "BlockGather"):
            _pack_blocks(graph, node, packed)
        elif node.op_type in ("ExpertMatMul", "BlockExpertMatMul"):
            _pack_experts(graph, node)
        elif node.op_type in ("MatMul", "MatMulNT") and _is_weight(node.inputs[1]):
            _pack_floats(graph, node, packed)
    for node in list(graph):
        if node.op_type == "Gather" and node.inputs[0] is not None and str(node.inputs[0].name) in packed:
            _look_up(graph, node, packed[str(node.inputs[0].name)])
    clean(model)


def _is_weight(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and len(dims(value) or ()) == 2


def _pack_blocks(graph: ir.Graph, node: ir.Node, packed: dict[str, list[ir.Value]]) -> None:
    form, weight = pack_weight(graph, node, packed)
    attributes = {"inner": node.attributes["columns"].as_int(), "columns": rows_of(node)} | asdict(form)
    if node.op_type == "BlockGather":
        new = insert(node, "RowwiseGather", [node.inputs[0], *weight], DOMAIN, attributes)
    else:
        attributes |= {"rounding": node.attributes["rounding"].as_int(), "instructions": -1}
        new = insert(node, PRODUCT, [node.inputs[0], *weight], DOMAIN, attributes)
    _put(graph, node, new.outputs[0])


def _pack_floats(graph: ir.Graph, node: ir.Node, packed: dict[str, list[ir.Value]]) -> None:
    x, weight = node.inputs
    assert weight is not None
    name, turned = str(weight.name), node.op_type == "MatMulNT"
    rows, columns = (int(size) for size in dims(weight) or ())
    inner, columns = (columns, rows) if turned else (rows, columns)
    if name not in packed:
        shape = [-(-columns // COLUMNS), 4 * inner * COLUMNS]
        make = partial(_floats, weight, turned)
        packed[name] = [panels_of(graph, f"{name}_panels", shape, make)]
    attributes = {"inner": inner, "columns": columns, "bits": 32, "block": inner, **_NO_FACTORS}
    attributes |= {"rounding": 32, "instructions": -1}
    _put(graph, node, insert(node, PRODUCT, [x, *packed[name]], DOMAIN, attributes).outputs[0])


def _pack_experts(graph: ir.Graph, node: ir.Node) -> None:
    """Pack the weights of all experts one after another, in blocks if they are quantized."""
    x, weight, *factors, chosen = node.inputs
    assert weight is not None
    experts, rows, *rest = (int(size) for size in dims(weight) or ())
    attributes = {name: each.as_int() for name, each in node.attributes.items()}
    turned, bits = bool(attributes.pop("turned", 0)), attributes.setdefault("bits", 32)
    if factors:
        columns, inner = rows, rest[0] * attributes["block"]
        form = BlockForm.of(node, factors)
        made = [_Part("codes", form.code_bytes(rest[0]), partial(packed_codes, bits=bits), [weight])]
        made += [_Part("factors", form.factor_bytes(rest[0]), partial(packed_factors, form), factors)]
        attributes |= asdict(form)
    else:
        inner, columns = (rows, rest[0]) if turned else (rest[0], rows)
        attributes |= {"block": inner, "rounding": 32, **_NO_FACTORS}
        made = [_Part("floats", 4 * inner, partial(_packed_floats, turned=turned), [weight])]
    panels, packed = -(-columns // COLUMNS), list[ir.Value | None]()
    for part in made:
        make = partial(_each, part.make, part.values)
        packed.append(
            panels_of(graph, f"{weight.name}_panels_{part.name}", [experts, panels, COLUMNS * part.bytes], make)
        )
    packed += [None] * (2 - len(packed))
    attributes |= {"inner": inner, "columns": columns, "instructions": -1}
    new = insert(node, PRODUCT, [x, *packed, chosen], DOMAIN, attributes)
    _put(graph, node, new.outputs[0])


class _Part(NamedTuple):
    """A part of packed weights, and what makes it of an expert's part of the values."""

    name: str
    bytes: int  # of a column
    make: Callable[..., NDArray[Any]]
    values: Sequence[ir.Value | None]


def _each(make: Callable[..., NDArray[Any]], values: Sequence[ir.Value | None]) -> NDArray[Any]:
    """Return what is made of each expert's part of the values."""
    return np.stack([make(*of_expert) for of_expert in zip(*map(numbers_of, values), strict=True)])


def _packed_floats(numbers: NDArray[np.float32], turned: bool) -> NDArray[np.uint8]:
    return pack_floats(numbers.T if turned else numbers)


def _floats(weight: ir.Value, turned: bool) -> NDArray[np.uint8]:
    return _packed_floats(numbers_of(weight), not turned)


def _look_up(graph: ir.Graph, node: ir.Node, panels: list[ir.Value]) -> None:
    """Look up rows of a weight that a product has packed already, so that it is stored once."""
    rows, inner = (int(size) for size in dims(node.inputs[0]) or ())
    attributes = {"inner": inner, "columns": rows, "bits": 32, "block": inner, **_NO_FACTORS}
    _put(graph, node, insert(node, "RowwiseGather", [node.inputs[1], *panels], DOMAIN, attributes).outputs[0])


def _put(graph: ir.Graph, node: ir.Node, new: ir.Value) -> None:
    old = node.outputs[0]
    new.shape, new.type = old.shape, old.type
    replace(old, new)
    graph.remove(node, safe=True)


@dataclass(frozen=True)
class _Place:
    """The inputs that say where a step's nodes are: those of all operators, and those of some."""

    nodes: list[ir.Value]
    positions: ir.Value
    row_positions: ir.Value
    state_rows: ir.Value


def lower(portable: ir.Model, capacity: int) -> ir.Model:
    """Return a new model over caches of `capacity` rows for any number of slots; the portable one is not changed."""
    model = portable.clone()
    graph = model.graph
    by_name = {value.name: value for value in graph.inputs}
    batch_of_tokens(graph)  # the portable cache inputs are removed below
    place = _Place(
        [
            graph_input("slots", ir.DataType.INT32, ["nodes"]),
            graph_input("rows", ir.DataType.INT32, ["nodes"]),
            graph_input("committed", ir.DataType.INT32, ["slots"]),
            graph_input("visible", ir.DataType.BOOL, ["nodes", "width"]),
        ],
        by_name["position_ids"],
        graph_input("row_positions", ir.DataType.INT32, ["slots", capacity]),
        graph_input("state_rows", ir.DataType.INT32, ["slots"]),
    )
    caches = _lower_caches(graph, place, capacity)
    expand(graph, {"AddRMSNorm": residual_norm})  # its parts go to different products
    fuse(graph)
    expand(graph, _LOWERED)
    (logits,) = (value for value in graph.outputs if value.name == "logits")
    hidden = [value for value in graph.outputs if value.name == "hidden"]
    flat = [by_name["input_ids"], by_name["position_ids"], by_name["logit_nodes"]]
    if "hidden_in" in by_name:
        flat.append(by_name["hidden_in"])
    for value in (*flat[:2], *flat[3:], *hidden):
        value.shape = ir.Shape([1, "nodes", *(dims(value) or ())[2:]])
    logits.shape = ir.Shape([1, "logit_nodes", dims(logits)[-1]])  # type: ignore[index]
    some = [each for each in (place.row_positions, place.state_rows) if each.uses()]
    graph.inputs.clear()
    graph.inputs.extend([*flat, *place.nodes, *some, *caches])
    graph.outputs.clear()
    graph.outputs.extend([logits, *hidden])
    clean(model)
    for node in graph:  # these shapes are the portable graph's: ONNX Runtime infers its own
        for output in node.outputs:
            if not output.is_graph_output():
                output.shape = None
    return model


def _lower_caches(graph: ir.Graph, place: _Place, capacity: int) -> list[ir.Value]:
    """Replace what has a cache by the operators', and return the caches in the order of their numbers."""
    found = dict[int, list[ir.Value]]()
    for node in list(graph):
        if node.domain == DOMAIN and node.op_type in _CACHES:
            past = _CACHES[node.op_type].past
            layer = int(str(node.inputs[past].name).rpartition(".")[2])  # type: ignore[union-attr]
            found[layer] = _CACHES[node.op_type].lower(graph, node, layer, place, capacity)
    return [cache for _, caches in sorted(found.items()) for cache in caches]


def _lower_convolution(graph: ir.Graph, node: ir.Node, layer: int, place: _Place, capacity: int) -> list[ir.Value]:
    """Replace a portable `TreeConvolution` by the operator's, and return its caches."""
    x, weight, bias, *_ = node.inputs
    if (squeeze := producer(weight, "Squeeze")) is not None:  # of a weight [C, 1, L]
        weight = squeeze.inputs[0]
    caches = _rows_of(node, layer, capacity)
    new = insert(node, "TreeConvolution", [x, *caches, *place.nodes, weight, bias], DOMAIN)
    _swap(graph, node, new.outputs[0])
    return caches


def _lower_recurrence(graph: ir.Graph, node: ir.Node, layer: int, place: _Place, capacity: int) -> list[ir.Value]:
    """Replace a portable `TreeRecurrence` by the operator's, and return its caches and states."""
    changes, caches = node.inputs[:5], _rows_of(node, layer, capacity)
    numbers = int(dims(caches[1])[3]) * int(dims(changes[1])[3])  # type: ignore[index]
    states = graph_input(f"states.{layer}", ir.DataType.FLOAT, ["slots", numbers])
    inputs = [*changes, states, *caches, *place.nodes, place.state_rows]
    new = insert(node, "TreeRecurrence", inputs, DOMAIN, {"delta": node.attributes["delta"].as_int()})
    _swap(graph, node, new.outputs[0])
    return [*caches, states]


def _rows_of(node: ir.Node, layer: int, capacity: int) -> list[ir.Value]:
    """Return the caches of a convolution or a recurrence, which have the portable ones' rows."""
    past = _CACHES[node.op_type].past
    sizes = [int(dims(each)[3]) for each in node.inputs[past : past + 2]]  # type: ignore[index]
    return [
        graph_input(f"{kind}.{layer}", ir.DataType.FLOAT, ["slots", 1, capacity, size])
        for kind, size in zip(("keys", "values"), sizes, strict=True)
    ]


def _swap(graph: ir.Graph, node: ir.Node, new: ir.Value) -> None:
    """Put an operator's output in the place of a portable node's, whose caches are no outputs any more."""
    new.type = ir.TensorType(ir.DataType.FLOAT)
    for old in node.outputs[1:]:
        while old.is_graph_output():
            graph.outputs.remove(old)
    replace(node.outputs[0], new)
    graph.remove(node, safe=True)


def _lower_attention(graph: ir.Graph, node: ir.Node, layer: int, place: _Place, capacity: int) -> list[ir.Value]:
    """Replace a portable `TreeAttention` by the operator's, and return its caches."""
    (_, heads, _, size), (_, kv_heads, *_) = dims(node.inputs[0]), dims(node.inputs[1])  # type: ignore[misc]
    value_size = dims(node.inputs[2])[3]  # type: ignore[index]
    kinds = {"keys": size, "values": value_size}
    caches = [
        graph_input(f"{kind}.{layer}", ir.DataType.FLOAT, ["slots", kv_heads, capacity, width])
        for kind, width in kinds.items()
    ]
    tables, sinks = list(node.inputs[9:11]) or [None, None], node.inputs[11:]
    window = window_of(node)
    query_key_value = _packed([_rows(graph, node, each) for each in node.inputs[:3]])
    row_positions = place.row_positions if window else None
    inputs = [*query_key_value, *caches, *place.nodes, place.positions, *tables, row_positions, *sinks]
    attributes = {
        "heads": int(heads),
        "kv_heads": int(kv_heads),
        "key_size": int(size),
        "value_size": int(value_size),
        "window": window,
        "scale": node.attributes["scale"].as_float(),
        "softcap": node.attributes["softcap"].as_float(),
        "instructions": -1,
    }
    attended = insert(node, "TreeAttention", inputs, DOMAIN, attributes).outputs[0]
    attended.type = ir.TensorType(ir.DataType.FLOAT)
    for old in node.outputs[1:]:
        while old.is_graph_output():
            graph.outputs.remove(old)
    _hand_over(graph, node.outputs[0], attended)
    graph.remove(node, safe=True)
    return caches


def _packed(rows: list[ir.Value]) -> list[ir.Value | None]:
    """Return the merged projection if query, key and value are a Split of it: the operator takes it whole."""
    split = producer(rows[0], "Split")
    if split is not None and all(a is b for a, b in zip(split.outputs, rows, strict=True)):
        return [split.inputs[0], None, None]
    return list(rows)


def _rows(graph: ir.Graph, before: ir.Node, value: ir.Value | None) -> ir.Value:
    """Return `[B, H, N, D]` as `[B, N, H·D]`: the projection's own output where possible."""
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
    return insert(before, "Reshape", [value, _shape(graph, int(heads) * int(size))]).outputs[0]


def _hand_over(graph: ir.Graph, heads: ir.Value, rows: ir.Value) -> None:
    """Give the result `[B, N, H·D]` to users that reshape it to that; reshape it to `[B, N, H, D]` for the others."""
    for reshape in [use.node for use in heads.uses()]:
        if reshape.op_type == "Reshape" and len(dims(reshape.outputs[0]) or ()) == 3:
            replace(reshape.outputs[0], rows)
            graph.remove(reshape, safe=True)
    if heads.uses():
        shape = _shape(graph, *(int(dim) for dim in (dims(heads) or [])[2:]))
        replace(heads, insert(heads.producer(), "Reshape", [rows, shape]).outputs[0])  # type: ignore[arg-type]


def _shape(graph: ir.Graph, *sizes: int) -> ir.Value:
    return constant(graph, f"rows_{'_'.join(map(str, sizes))}", np.array([0, 0, *sizes], dtype=np.int64))


def _norm(node: ir.Node) -> list[ir.Value]:
    """Lower RMSNormalization to ONNX Runtime's own kernel."""
    attributes = {"axis": -1, "epsilon": node.attributes["epsilon"].as_float(), "stash_type": 1}
    return list(insert(node, "SimplifiedLayerNormalization", node.inputs, attributes=attributes).outputs)


def _scaled_product(node: ir.Node) -> list[ir.Value]:
    """Lower `ScaledMatMul` to a product of two unsigned integer tensors.

    On x86 processors without VNNI this kernel saturates if the weights are signed, and is ten times slower if both
    tensors are.
    """
    x, weight, scales, input_scale = node.inputs
    assert node.graph is not None
    assert weight is not None
    assert weight.const_value is not None
    zero = constant(node.graph, "zero_uint8", np.array(128, dtype=np.uint8))
    rounded = insert(node, "QuantizeLinear", [x, input_scale, zero]).outputs[0]
    make = partial(_unsigned, weight.const_value)
    tensor = recipe(f"{weight.name}_unsigned", ir.DataType.UINT8, weight.const_value.shape.numpy(), make)
    unsigned = initializer(node.graph, tensor)
    inputs = [rounded, unsigned, input_scale, scales, zero, zero]
    return list(insert(node, "MatMulIntegerToFloat", inputs, "com.microsoft").outputs)


def _unsigned(codes: ir.TensorProtocol) -> NDArray[np.uint8]:
    return codes.numpy().view(np.uint8) ^ np.uint8(128)


class _Cached(NamedTuple):
    """An operator with caches: which input is the first of them, and what lowers it."""

    past: int
    lower: Callable[[ir.Graph, ir.Node, int, _Place, int], list[ir.Value]]


_CACHES = {
    "TreeAttention": _Cached(3, _lower_attention),
    "TreeConvolution": _Cached(3, _lower_convolution),
    "TreeRecurrence": _Cached(5, _lower_recurrence),
}
_LOWERED = {
    "RMSNormalization": _norm,
    "SwiGLU": swiglu,
    "ScaledMatMul": _scaled_product,
}
