"""Lowers quantized products to ONNX's QuantizeLinear and DequantizeLinear, the form that TensorRT takes.

A compiler fuses these pairs into products of the narrow types. ONNX Runtime does so for INT8 and computes the rest as
written, by which a graph is checked without a GPU. Scales have the type that is computed in. Blocks that no such pair
holds, and lookups, take the weight's own numbers in that type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from specbuild.builder.config.scheme import Scheme
from specbuild.builder.passes.pattern import TRANSPOSED, constant, dims, initializer, insert, numbers_of, recipe
from specbuild.builder.quantize.numbers import PARTS, Quantized

_NARROW = {4: ir.DataType.INT4, 8: ir.DataType.INT8}


def scaled_product(node: ir.Node) -> list[ir.Value]:
    """Lower `ScaledMatMul`: input and weight are rounded to one narrow type, the input by a calibrated scale."""
    x, weight, scales, input_scale = node.inputs
    assert weight is not None
    dtype = weight.dtype
    zero = constant(node.graph, f"zero_{dtype.name.lower()}", np.zeros((), dtype=dtype.numpy()))  # type: ignore
    rounded = _then(node, "QuantizeLinear", [x, input_scale, zero], weight)
    restored = _then(node, "DequantizeLinear", [rounded, input_scale, zero], weight, "input")
    restored.type = x.type  # type: ignore[union-attr]
    kernel = _then(node, "DequantizeLinear", [weight, scales], weight, attributes={"axis": 1})
    kernel.type = scales.type  # type: ignore[union-attr]
    return list(insert(node, "MatMul", [restored, kernel]).outputs)


def block_product(node: ir.Node) -> list[ir.Value]:
    """Lower a `BlockMatMul` to a product with a dequantized weight.

    A symmetric weight is DequantizeLinear's, `[K, N]` with a scale for each block of a column. Any other, which no
    engine has, is ONNX Runtime's alone to multiply, as a graph is checked.
    """
    if len(node.inputs) > 3 or node.attributes["bits"].as_int() not in _NARROW:
        operands = node.inputs[0], restored(node)
        return list(insert(node, "FusedMatMul", operands, "com.microsoft", {"transB": 1}).outputs)
    (x, codes, scales), graph = node.inputs, node.graph
    assert codes is not None
    assert scales is not None
    assert graph is not None
    numbers, factors = codes.const_value, scales.const_value  # which other passes may replace later
    assert numbers is not None
    assert factors is not None
    bits, size = node.attributes["bits"].as_int(), node.attributes["block"].as_int()
    rows, blocks, _ = (int(each) for each in dims(codes) or ())
    attributes, shape = {"axis": 0, "block_size": size}, [blocks, rows]
    if blocks == 1:
        attributes, shape = {"axis": 1}, [rows]
    turned = partial(_turned_codes, numbers, bits), partial(_turned_factors, factors)
    tensors = (
        recipe(f"{codes.name}_turned", _NARROW[bits], [blocks * size, rows], turned[0]),
        recipe(f"{scales.name}_turned", factors.dtype, shape, turned[1]),
    )
    values = [initializer(graph, tensor) for tensor in tensors]
    kernel = _then(node, "DequantizeLinear", values, codes, attributes=attributes)
    kernel.type = scales.type
    return list(insert(node, "MatMul", [x, kernel]).outputs)


def block_lookup(node: ir.Node) -> list[ir.Value]:
    """Lower a `BlockGather` to a Gather of the weight's own numbers."""
    return list(insert(node, "Gather", [restored(node), node.inputs[0]]).outputs)


def restored(node: ir.Node) -> ir.Value:
    """Return the weight `[N, K]` of a node in blocks, as a recipe of its own numbers in float32."""
    graph, codes, bits = node.graph, node.inputs[1], node.attributes["bits"].as_int()
    assert graph is not None
    assert codes is not None
    parts = {name: value for name, value in zip(PARTS, node.inputs[1:], strict=False) if value is not None}
    name, scheme = f"{str(codes.name).removesuffix('_codes')}_restored", Scheme(f"int{bits}", "fp32")
    if name in graph.initializers:
        return graph.initializers[name]
    rows, blocks, _ = (int(each) for each in dims(codes) or ())

    def make() -> np.ndarray:
        numbers = {part: numbers_of(value) for part, value in parts.items()}
        numbers["codes"] = unpack(numbers["codes"].reshape(rows, -1), bits).reshape(rows, blocks, -1)
        if "zeros" in numbers:
            numbers["zeros"] = unpack(numbers["zeros"], bits)[:, :blocks]
        tensors: dict[str, Any] = {part: torch.from_numpy(np.ascontiguousarray(each)) for part, each in numbers.items()}
        return Quantized(scheme, **tensors).restored().numpy()

    return initializer(graph, recipe(name, ir.DataType.FLOAT, [rows, node.attributes["columns"].as_int()], make))


def _turned_codes(codes: ir.TensorProtocol, bits: int) -> np.ndarray:
    packed = codes.numpy()
    return np.ascontiguousarray(_signed(packed.reshape(len(packed), -1), bits).T)


def _turned_factors(scales: ir.TensorProtocol) -> np.ndarray:
    factors = scales.numpy().T
    return np.ascontiguousarray(factors[0] if len(factors) == 1 else factors)


def _then(
    node: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    weight: ir.Value,
    of: str = "",
    attributes: Mapping[str, int] | None = None,
) -> ir.Value:
    """Insert an operator, named after its weight for a compiler's messages and list of layers; return its output."""
    new = insert(node, op_type, inputs, attributes=attributes)
    whose = str(weight.name).rpartition("_")[0].replace(TRANSPOSED, "")
    new.name = " ".join(filter(None, (op_type.removesuffix("Linear").lower(), of, whose)))
    return new.outputs[0]


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return codes of 4 bits, two in a byte, one in each; wider ones as they are."""
    return packed if bits != 4 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _signed(packed: np.ndarray, bits: int) -> np.ndarray:
    """Convert codes in which the middle of the range stands for 0 to signed numbers of as many bits."""
    if bits == 8:
        return (packed.astype(np.int16) - 128).astype(np.int8)
    return (unpack(packed, bits).astype(np.int8) - 8).astype(ml_dtypes.int4)
