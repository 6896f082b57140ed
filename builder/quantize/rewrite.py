"""Puts quantized weights into the portable graph.

`MatMul(x, w)` and `MatMulNT(x, w)` become `specbuild::BlockMatMul(x, codes, scales[, zeros[, offsets[, scale_steps[,
offset_steps]]]])`, codes `uint8[N, blocks, size]`, of 4 bits two in a byte, the first in the low bits; scales and
offsets `[N, blocks]` are float32, or int8 where they have steps. Its attributes `rounding` and `scale_bits` say to how
many bits each block of x is rounded (32: not at all), and how many bits hold a scale. With static activations they
become `specbuild::ScaledMatMul(x, weight, scales, input_scale)`, weight `int8` or `E4M3 [K, N]`, scales `[N]`. The
embedding's Gather becomes `BlockGather`. Zero points of 4 bits are packed as codes are. The factors by which an input
is divided are folded into the weight of the norm before it, or become a Mul.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from specbuild.builder.config.scheme import STEP, Scheme
from specbuild.builder.passes.pattern import TRANSPOSED, FusionPass, dims, initializer, insert, recipe, replace
from specbuild.runtime.errors import OptionError

from .linears import Names
from .numbers import PARTS, Numbers, Quantized, joined

ROUNDINGS = {"dynamic": 8, "wide": 16, "weight-only": 32}  # bits of an input's numbers, by the scheme's activations
_NORMS = {"RMSNormalization": 1, "AddRMSNorm": 2}  # index of the weight among the inputs


class Quantize(FusionPass):
    """The pass that puts quantized weights into a graph; weights that are not in `found`, by name, stay as they are.

    Raises OptionError if the weights of a merged MatMul have different schemes.
    """

    left = "takes a weight that is to be quantized"

    def __init__(self, found: Mapping[str, Numbers], names: Names) -> None:
        super().__init__()
        self.found, self.names = found, names
        self._made: dict[tuple[int, ...], list[ir.Value | None]] = {}
        self._latest = _Latest()

    def find(self, node: ir.Node) -> tuple[ir.Value, ir.Value, bool, list[Numbers]] | None:
        """Return a node's input, its weight, whether it is a lookup, and the quantized weights; None if none match."""
        matched = _weight(node)
        parts = self._parts(*matched[1:]) if matched else []
        return (*matched, parts) if matched and parts else None

    def rewrite(self, graph: ir.Graph, node: ir.Node, found: tuple[ir.Value, ir.Value, bool, list[Numbers]]) -> None:
        """Replace the node by one that takes the quantized weights."""
        x, weight, lookup, parts = found
        inputs = self._made.setdefault(tuple(map(id, parts)), [])
        scheme = parts[0].scheme
        if not inputs:
            name = f"{weight.name}{'_lookup' if lookup else ''}"
            blocks_of = partial(_block_weight, latest=self._latest)
            inputs += (blocks_of if parts[0].input_scale is None else _scaled_weight)(graph, name, parts)
        _, blocks, size = parts[0].shape
        columns = blocks * size
        x = self._divide(graph, node, x, parts[0].smooth)
        attributes: dict[str, object] = {"columns": columns}
        if parts[0].input_scale is None:
            operator = "BlockGather" if lookup else "BlockMatMul"
            attributes |= {"bits": scheme.bits, "block": size, "scale_bits": scheme.scale_bits}
            attributes |= {"rounding": ROUNDINGS[scheme.activations]}
        else:
            operator = "ScaledMatMul"
        replace(node.outputs[0], insert(node, operator, [x, *inputs], "specbuild", attributes).outputs[0])
        graph.remove(node, safe=True)

    def _parts(self, weight: ir.Value, lookup: bool) -> list[Numbers]:
        """Return the quantized weights of which a graph's weight is made: several if merged, none if it stays."""
        names = _parts_of(weight)
        if self.names.tied and names[0] in (self.names.embedding, self.names.head):
            names = [self.names.embedding if lookup else str(self.names.head)]
        parts = [self.found.get(name) for name in names]
        if len({part and (part.scheme, part.shape[2]) for part in parts}) > 1:
            raise _several(names)
        return [part for part in parts if part]

    def _divide(self, graph: ir.Graph, node: ir.Node, x: ir.Value, smooth: torch.Tensor | None) -> ir.Value:
        """Divide an input by `smooth`: in the weight of the norm before it if nothing else reads it, else by a Mul."""
        if smooth is None:
            return x
        norm, kernel = x.producer(), node.inputs[1]
        assert kernel is not None
        alone = len(x.uses()) == 1 and not x.is_graph_output()
        if norm is not None and norm.op_type in _NORMS and x is norm.outputs[0] and alone:
            at = _NORMS[norm.op_type]
            weight = norm.inputs[at]
            if weight is not None and weight.const_value is not None and len(dims(weight) or ()) == 1:
                exact = weight.const_value.numpy()
                divided = (exact / smooth.numpy()).astype(exact.dtype)
                norm.replace_input_with(at, initializer(graph, ir.tensor(divided, name=f"{weight.name}/{kernel.name}")))
                return x
        factors = initializer(graph, ir.tensor((1 / smooth).numpy(), name=f"{kernel.name}_divided"))
        product = _of(node, "Mul", x, factors)
        product.shape, product.type = x.shape, x.type
        return product


def _of(node: ir.Node, operator: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
    """Insert an operator before a node and return its output."""
    return insert(node, operator, inputs, attributes=attributes).outputs[0]


def check_products(graph: ir.Model, schemes: Mapping[str, Scheme]) -> None:
    """Raise OptionError if weights that were merged into one MatMul have different schemes; needs no calibration."""
    for value in graph.graph.initializers.values():
        if len({schemes.get(name) for name in _parts_of(value)}) > 1:
            raise _several(_parts_of(value))


def _parts_of(weight: ir.Value) -> list[str]:
    """Return the names of the model's weights of which a graph's weight is made."""
    return [name.removesuffix(TRANSPOSED).removesuffix(".weight") for name in str(weight.name).split("+")]


def _several(names: Sequence[str]) -> OptionError:
    return OptionError(f"{', '.join(names)} are one product: give them one precision")


def _weight(node: ir.Node) -> tuple[ir.Value, ir.Value, bool] | None:
    """Return a MatMul's or the embedding lookup's input and weight, and whether it is the lookup; None for others."""
    lookup = node.op_type == "Gather"
    if node.op_type not in ("MatMul", "MatMulNT", "Gather"):
        return None
    x, weight = node.inputs[1 if lookup else 0], node.inputs[0 if lookup else 1]
    if x is None or weight is None or not weight.is_initializer() or len(dims(weight) or ()) != 2:
        return None
    return None if lookup and not _tokens(x) else (x, weight, lookup)


def _tokens(x: ir.Value) -> bool:
    """Return whether a value is input_ids, which some models reshape."""
    while (node := x.producer()) and node.op_type == "Reshape" and node.inputs[0] is not None:
        x = node.inputs[0]
    return x.name == "input_ids"


def _block_weight(graph: ir.Graph, name: str, parts: Sequence[Numbers], latest: _Latest) -> list[ir.Value | None]:
    """Add the parts of a quantized weight to a graph, as recipes; those between that it lacks are None."""
    bits, rows, (_, blocks, size) = parts[0].scheme.bits, sum(part.shape[0] for part in parts), parts[0].shape
    codes = {"codes": (rows, blocks, packed_size(size, bits)), "zeros": (rows, packed_size(blocks, bits))}
    steps = dict.fromkeys(("scale_steps", "offset_steps"), (rows, -(-blocks * size // STEP)))
    values = list[ir.Value | None]()
    for part in PARTS[: 1 + PARTS.index(parts[0].parts[-1])]:
        if part not in parts[0].parts:
            values.append(None)
            continue
        multiple = f"{part.removesuffix('s')}_steps" in parts[0].parts
        factor = ir.DataType.INT8 if multiple else ir.DataType.FLOAT
        dtype = ir.DataType.UINT8 if part in codes else factor
        shape = (codes | steps).get(part, (rows, blocks))
        tensor = recipe(f"{name}_{part}", dtype, shape, partial(latest.numbers, parts, part, bits))
        values.append(initializer(graph, tensor))
    return values


@dataclass
class _Latest:
    """The weight that was made last: its parts are written one after the other, and it is made once for all."""

    parts: Sequence[Numbers] = ()
    whole: Quantized | None = None

    def numbers(self, parts: Sequence[Numbers], name: str, bits: int) -> NDArray[Any]:
        """Return one part's numbers, as they are stored."""
        if self.parts is not parts or self.whole is None:
            self.whole = None  # before the next takes memory
            self.parts, self.whole = parts, _joined(parts)
        found: NDArray[Any] = getattr(self.whole, name).numpy()
        if name == parts[0].parts[-1]:
            self.whole = None
        return pack(found, bits) if name in ("codes", "zeros") else found


def _scaled_weight(graph: ir.Graph, name: str, parts: Sequence[Numbers]) -> list[ir.Value]:
    """Add a weight with static activations to a graph, as recipes: `[K, N]`, a scale for each column and one of all."""
    rows, (_, blocks, size) = sum(part.shape[0] for part in parts), parts[0].shape
    narrow = ir.DataType.FLOAT8E4M3FN if parts[0].scheme.kind == "fp8" else ir.DataType.INT8
    scale = np.array(parts[0].input_scale, dtype=np.float32)
    tensors = (
        recipe(f"{name}_numbers", narrow, (blocks * size, rows), partial(_turned_codes, parts)),
        recipe(f"{name}_scales", ir.DataType.FLOAT, (rows,), lambda: _joined(parts).scales[:, 0].numpy()),
        ir.tensor(scale, name=f"{name}_input_scale"),
    )
    return [initializer(graph, tensor) for tensor in tensors]


def _joined(parts: Sequence[Numbers]) -> Quantized:
    return joined([part.whole() for part in parts])


def _turned_codes(parts: Sequence[Numbers]) -> NDArray[Any]:
    codes = _joined(parts).codes.flatten(1).T.contiguous()
    if codes.dtype == torch.uint8:
        return (codes ^ 128).view(torch.int8).numpy()
    numbers: NDArray[Any] = codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return numbers


def packed_size(count: int, bits: int) -> int:
    """Return how many bytes `pack` makes of so many codes."""
    return -(-count // 2) if bits == 4 else count


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack codes along the last axis: two 4-bit codes in a byte, padded with a 0; wider codes stay as they are."""
    if bits != 4:
        return codes
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return np.asarray(codes[..., 0::2] | codes[..., 1::2] << 4, dtype=np.uint8)
