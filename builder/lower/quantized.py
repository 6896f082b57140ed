"""Quantized products in ONNX's own QuantizeLinear and DequantizeLinear, as TensorRT takes them.

A compiler fuses the pairs into products of the narrow types; ONNX Runtime does for INT8, and computes the rest as
written, which is what a graph is checked by where there is no GPU. Scales have the type that is computed in.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ..passes.pattern import constant, initializer, insert


def scaled_product(node: ir.Node) -> list[ir.Value]:
    """`ScaledMatMul`: input and weight rounded to one narrow type, the input by a scale that was calibrated."""
    x, weight, scales, input_scale = node.inputs
    dtype = weight.dtype  # type: ignore[union-attr]
    zero = constant(node.graph, f"zero_{dtype.name.lower()}", np.zeros((), dtype=dtype.numpy()))  # type: ignore
    rounded = insert(node, "QuantizeLinear", [x, input_scale, zero]).outputs[0]
    restored = insert(node, "DequantizeLinear", [rounded, input_scale, zero]).outputs[0]
    restored.type = x.type  # type: ignore[union-attr]
    kernel = insert(node, "DequantizeLinear", [weight, scales], attributes={"axis": 1}).outputs[0]
    kernel.type = scales.type  # type: ignore[union-attr]
    return list(insert(node, "MatMul", [restored, kernel]).outputs)


def block_product(node: ir.Node) -> list[ir.Value]:
    """`BlockMatMul` of symmetric weights, which alone are quantized: `[K, N]`, a scale for each block of a column."""
    (x, codes, scales), graph = node.inputs, node.graph
    assert codes is not None
    assert scales is not None
    assert graph is not None
    bits, size = node.attributes["bits"].as_int(), node.attributes["block"].as_int()
    packed, factors = codes.const_value.numpy(), scales.const_value.numpy()  # type: ignore[union-attr]
    numbers, factors = _signed(packed.reshape(len(packed), -1), bits).T, factors.T
    attributes = {"axis": 0, "block_size": size}
    if len(factors) == 1:
        attributes, factors = {"axis": 1}, factors[0]
    turned = (codes, numbers), (scales, factors)
    values = [initializer(graph, ir.tensor(np.ascontiguousarray(a), name=f"{v.name}_turned")) for v, a in turned]
    kernel = insert(node, "DequantizeLinear", values, attributes=attributes).outputs[0]
    kernel.type = scales.type
    return list(insert(node, "MatMul", [x, kernel]).outputs)


def _signed(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes around the middle as signed numbers of as many bits."""
    if bits == 8:
        return (packed.astype(np.int16) - 128).astype(np.int8)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return (codes.astype(np.int8) - 8).astype(ml_dtypes.int4)
