"""Quantizes the weights of a mixture's experts: rounded to nearest, since few texts reach each expert to calibrate it.

`ExpertMatMul(x, weight, chosen)` becomes `BlockExpertMatMul(x, codes, scales[, zeros], chosen)`, whose codes, scales
and zero points are those of `BlockMatMul` for each expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from specbuild.builder.config.scheme import Scheme
from specbuild.builder.passes.pattern import FusionPass, dims, initializer, insert, numbers_of, recipe
from specbuild.builder.passes.pattern import replace as replace_value

from .numbers import Quantized, fit, quantize
from .rewrite import ROUNDINGS, pack

BLOCK = 32  # columns that share a scale, where the scheme has one for a whole row


class QuantizeExperts(FusionPass):
    """The pass that quantizes the experts' weights of a graph by one scheme."""

    left = "takes experts that are to be quantized"

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = replace(scheme.to_nearest, block=scheme.block or BLOCK)

    def find(self, node: ir.Node) -> tuple[ir.Value, Scheme] | None:
        """Return the experts' weight and its scheme; None for other nodes, and where no block size fits."""
        weight = node.inputs[1] if node.op_type == "ExpertMatMul" else None
        if weight is None or not weight.is_initializer():
            return None
        columns = int((dims(weight) or ())[1 if node.attributes["turned"].as_int() else 2])
        scheme = fit(self.scheme, columns)
        return (weight, scheme) if scheme.quantized else None

    def rewrite(self, graph: ir.Graph, node: ir.Node, found: tuple[ir.Value, Scheme]) -> None:
        """Replace the node by one that takes codes and their factors."""
        weight, scheme = found
        turned, (experts, rows, columns) = bool(node.attributes["turned"].as_int()), map(int, dims(weight) or ())
        rows, columns = (columns, rows) if turned else (rows, columns)
        blocks, bits = columns // scheme.block, scheme.bits
        whole = _Whole(weight, scheme, turned)
        shapes = {"codes": (rows, blocks, scheme.block * bits // 8), "scales": (rows, blocks)}
        if not scheme.symmetric:
            shapes["zeros"] = (rows, blocks if bits == 8 else -(-blocks // 2))
        inputs = []
        for part, shape in shapes.items():
            dtype = ir.DataType.FLOAT if part == "scales" else ir.DataType.UINT8
            make = partial(whole.numbers, part, part == list(shapes)[-1])
            inputs.append(initializer(graph, recipe(f"{weight.name}_{part}", dtype, (experts, *shape), make)))
        attributes = {"bits": bits, "block": scheme.block, "rounding": ROUNDINGS[scheme.activations]}
        attributes |= {"scale_bits": scheme.scale_bits}
        operands = [node.inputs[0], *inputs, node.inputs[2]]
        new = insert(node, "BlockExpertMatMul", operands, "specbuild", attributes)
        replace_value(node.outputs[0], new.outputs[0])
        graph.remove(node, safe=True)


@dataclass
class _Whole:
    """An experts' weight, which is quantized when its first part is written, and kept up to its last."""

    weight: ir.Value
    scheme: Scheme
    turned: bool
    quantized: list[Quantized] | None = None

    def numbers(self, part: str, last: bool) -> NDArray[Any]:
        """Return one part's numbers of all experts, as they are stored."""
        if self.quantized is None:
            weights = (torch.from_numpy(np.ascontiguousarray(each.T if self.turned else each)) for each in self._each())
            self.quantized = [quantize({"": each}, self.scheme)[""] for each in weights]
        found = [getattr(each, part).numpy() for each in self.quantized]
        if last:
            self.quantized = None
        return np.stack([pack(each, self.scheme.bits) if part != "scales" else each for each in found])

    def _each(self) -> NDArray[Any]:
        return numbers_of(self.weight)
