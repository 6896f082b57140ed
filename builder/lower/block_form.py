"""The form in which a CPU's operators take weights in blocks: how many bits their codes and factors have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from specbuild.builder.config.scheme import STEP


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Bits of a weight's codes, scales and minima, and the columns of a block, as `plugins/cpu/products.h` has them."""

    bits: int
    block: int
    scale_bits: int
    minimum_bits: int

    @classmethod
    def of(cls, node: ir.Node, factors: Sequence[ir.Value | None]) -> BlockForm:
        """Choose the narrowest minima that hold the zero points and offsets behind the scales of a node in blocks."""
        bits, block, scale_bits = (node.attributes[name].as_int() for name in ("bits", "block", "scale_bits"))
        zeros, offsets = (*factors[1:3], None, None)[:2]
        if zeros is None:
            return cls(bits, block, scale_bits, 0)
        if offsets is not None:
            return cls(bits, block, scale_bits, scale_bits)
        return cls(bits, block, scale_bits, 8 if bits < 8 else 32)

    def code_bytes(self, blocks: int) -> int:
        """Return the bytes of a column's codes."""
        return blocks * self.block * self.bits // 8

    def factor_bytes(self, blocks: int) -> int:
        """Return the bytes of a column's scales, minima and steps."""
        steps = -(-blocks * self.block // STEP) if self.scale_bits == 8 else 0
        return blocks * (self.scale_bits + self.minimum_bits) // 8 + 4 * steps * (1 + (self.minimum_bits == 8))
