"""Counts what a step of a graph computes: its products' parameters, its weights' bytes, and its attention's shapes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import onnx_ir as ir

from specbuild.builder.lower.block_form import BlockForm
from specbuild.builder.passes.pattern import dims
from specbuild.measure.roofline import Attention, Experts, Products

_PRODUCTS = {"MatMul", "MatMulNT", "Gemm", "BlockMatMul", "ScaledMatMul"}
_LOOKUPS = {"Gather", "GatherND", "BlockGather"}
_VIEWS = {"Transpose", "Reshape", "Cast"}  # operators that may lie between a weight and its product
_CHOSEN = {"ExpertMatMul", "BlockExpertMatMul"}  # by experts that the rows choose
_TABLES = 9  # TreeAttention's inputs from here on are rotary tables


def count(model: ir.Model, item_bytes: int) -> Products:
    """Count the products of a fused graph, quantized or not.

    A weight's parameters count for each product that uses it, its bytes once; tables that are only looked up do not
    count.

    Args:
        model: The graph.
        item_bytes: Bytes that a float32 number has after lowering.
    """
    attention, experts = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int, int]]()
    parameters = head_dim = 0
    for node in model.graph:
        if node.op_type == "TreeAttention":
            _, heads, _, head_dim = _sizes(node.inputs[0])
            (_, kv_heads, _, size), (*_, value_size) = _sizes(node.inputs[1]), _sizes(node.inputs[2])
            attention[node.attributes["window"].as_int(), heads, kv_heads * (size + value_size)] += 1
        if node.op_type in _CHOSEN:
            count, one = _sizes(node.inputs[1])[0], math.prod(_sizes(node.inputs[1])[1:])
            quantized = node.op_type != "ExpertMatMul"
            one = one * 8 // node.attributes["bits"].as_int() if quantized else one
            size = sum(_bytes(value, item_bytes) for value in node.inputs[1:-1] if value is not None) // count
            experts[count, _sizes(node.inputs[-1])[-1], one, size] += 1
        for weight, lookup in _weights(node):
            sizes = _sizes(weight)
            if lookup is not None:
                one = math.prod(sizes[1:])
                experts[sizes[0], _sizes(lookup)[0], one, one * item_bytes] += 1
            elif node.op_type == "BlockMatMul":
                parameters += sizes[0] * node.attributes["columns"].as_int()
            else:
                parameters += math.prod(sizes)
    read = sum(_bytes(value, item_bytes) for value in model.graph.initializers.values() if _is_read(value))
    read += sum(_block_bytes(model, item_bytes).values())
    return Products(
        parameters=parameters,
        bytes=read,
        head_dim=head_dim,
        attention=tuple(Attention(*key, layers) for key, layers in sorted(attention.items())),
        experts=tuple(Experts(*key, matrices) for key, matrices in sorted(experts.items())),
    )


def _weights(node: ir.Node) -> list[tuple[ir.Value, ir.Value | None]]:
    """Return a product's weights, each with the lookup's result if every node looks up its own (experts), else None."""
    found = list[tuple[ir.Value, ir.Value | None]]()
    for value in node.inputs[:2] if node.op_type in _PRODUCTS else ():
        while value is not None and (maker := value.producer()) is not None and maker.op_type in _VIEWS:
            value = maker.inputs[0]
        maker = value.producer() if value is not None else None
        table = maker.inputs[0] if maker is not None and maker.op_type in _LOOKUPS else None
        if value is not None and value.is_initializer():
            found.append((value, None))
        elif table is not None and table.is_initializer() and len(dims(table) or ()) > 2:  # rank 2: an embedding
            found.append((table, value))
    return found


def _is_read(value: ir.Value) -> bool:
    """Return whether every step reads all of an initializer; shapes and indices (int64) do not count."""
    return value.dtype != ir.DataType.INT64 and any(
        use.node.op_type not in {*_LOOKUPS, *_CHOSEN, "BlockMatMul"}
        and not (use.node.op_type == "TreeAttention" and use.idx >= _TABLES)
        for use in value.uses()
    )


def _block_bytes(model: ir.Model, item_bytes: int) -> dict[str, int]:
    """Return the bytes of weights in blocks, by the names of their codes, as the backend takes them."""
    found = dict[str, int]()
    for node in model.graph:
        if node.op_type == "BlockMatMul":
            form, (rows, blocks, *_) = BlockForm.of(node, node.inputs[2:]), _sizes(node.inputs[1])
            form = replace(form, scale_bits=min(form.scale_bits, 8 * item_bytes))  # as an engine has them
            bytes_of_row = form.code_bytes(blocks) + form.factor_bytes(blocks)
            found[str(node.inputs[1] and node.inputs[1].name)] = rows * bytes_of_row
    return found


def _bytes(value: ir.Value, item_bytes: int) -> int:
    size = value.dtype.itemsize if value.dtype else 0
    if value.dtype == ir.DataType.FLOAT:
        size = item_bytes
    return math.ceil(math.prod(_sizes(value)) * size)


def _sizes(value: ir.Value | None) -> list[int]:
    """Return a shape for one node of one sequence: a dimension "2*batch*nodes" becomes 2."""
    return [
        dim if isinstance(dim, int) else math.prod(int(part) for part in dim.split("*") if part.isdigit())
        for dim in dims(value) or ()
    ]
