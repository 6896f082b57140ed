"""Packs weights in blocks into the panels that specbuild's operators and kernels read, as recipes of initializers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specbuild.builder.passes.pattern import dims, initializer, numbers_of, recipe

from .block_form import BlockForm
from .panels import COLUMNS, pack_codes, pack_factors
from .quantized import unpack

_Floats = NDArray[np.float32]


def rows_of(node: ir.Node) -> int:
    """Return the rows of the weight of a node in blocks: a product's columns."""
    return int((dims(node.inputs[1]) or [0])[0])


def pack_weight(graph: ir.Graph, node: ir.Node, packed: dict[str, list[ir.Value]]) -> tuple[BlockForm, list[ir.Value]]:
    """Return the form of a node's weight, and its codes and factors in panels; `packed` has those made before."""
    codes, *factors = node.inputs[1:]
    assert codes is not None
    rows, blocks = (int(size) for size in (dims(codes) or ())[:2])
    form = BlockForm.of(node, factors)
    name = str(codes.name).removesuffix("_codes")
    if name not in packed:
        sizes = {"codes": form.code_bytes(blocks), "factors": form.factor_bytes(blocks)}
        makes = {"codes": partial(_codes, codes, form.bits), "factors": partial(_factors, form, factors)}
        packed[name] = [
            panels_of(graph, f"{name}_panels_{part}", [-(-rows // COLUMNS), COLUMNS * sizes[part]], make)
            for part, make in makes.items()
        ]
    return form, packed[name]


def panels_of(graph: ir.Graph, name: str, shape: Sequence[int], make: Callable[[], NDArray[np.uint8]]) -> ir.Value:
    """Add an initializer of bytes to a graph, which `make` returns when it is written."""
    return initializer(graph, recipe(name, ir.DataType.UINT8, shape, make))


def _codes(codes: ir.Value, bits: int) -> NDArray[np.uint8]:
    return packed_codes(numbers_of(codes), bits)


def packed_codes(numbers: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack codes `[N, blocks, bytes]`, of 4 bits two in a byte."""
    return pack_codes(unpack(numbers.reshape(len(numbers), -1), bits), bits)


def _factors(form: BlockForm, factors: Sequence[ir.Value | None]) -> NDArray[np.uint8]:
    scales, *others = factors
    return packed_factors(form, numbers_of(scales), *(None if each is None else numbers_of(each) for each in others))


def packed_factors(
    form: BlockForm,
    scales: NDArray[Any],
    zeros: NDArray[np.uint8] | None = None,
    offsets: NDArray[Any] | None = None,
    scale_steps: _Floats | None = None,
    offset_steps: _Floats | None = None,
) -> NDArray[np.uint8]:
    """Pack scales, and minima: what is taken off a block's products, in which code 0 is 0."""
    if form.scale_bits == 8:
        assert scale_steps is not None
        if offsets is not None and offset_steps is not None:
            return pack_factors(form.block, scales, offsets, scale_steps, -offset_steps)
        return pack_factors(form.block, scales, scale_steps)
    narrow = np.float16 if form.scale_bits == 16 else np.float32
    if zeros is None:
        return pack_factors(form.block, scales.astype(narrow))
    points = unpack(zeros, form.bits)[:, : scales.shape[1]]
    if form.minimum_bits == 8:
        return pack_factors(form.block, scales.astype(narrow), points.astype(np.int8))
    minima = scales * points.astype(np.float32) - (0 if offsets is None else offsets)
    return pack_factors(form.block, scales.astype(narrow), minima.astype(narrow if offsets is not None else np.float32))
