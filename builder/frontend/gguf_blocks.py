"""Decodes GGUF's quantized types to the codes, scales and offsets that a file holds, with nothing rounded again.

The layouts are those of ggml's `ggml-common.h`. A number is `scale · (code − zero) + offset`, in blocks of 16 or 32.
Codes of fewer than 4 bits take 4. Scales and offsets of the K types are multiples of a step for each 256 numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Factors(NamedTuple):
    """Scales or offsets, float32 `[rows, blocks]`, or int8: how many of the steps `[rows, K / 256]` they are."""

    numbers: NDArray[Any]
    steps: Floats | None = None

    @property
    def floats(self) -> Floats:
        """The numbers themselves, float32 `[rows, blocks]`."""
        numbers: Floats = self.numbers
        if self.steps is not None:
            numbers = numbers * np.repeat(self.steps, numbers.shape[1] // self.steps.shape[1], axis=1)
        return numbers


class Blocks(NamedTuple):
    """Numbers in blocks: uint8 codes `[rows, blocks, size]`, scales, the code of 0, and offsets, None if all are 0."""

    codes: Bytes
    scales: Factors
    zero: int
    offsets: Factors | None


class Format(NamedTuple):
    """How a type's numbers are kept: bits of a code, numbers of a block, whether blocks have offsets, and its decoder.

    `factor_bits` are those of a scale or offset: 16, or 8 where they are multiples of steps. The decoder maps a file's
    blocks `[n, bytes]` to codes `[n, …]`, scales and offsets.
    """

    bits: int
    block: int
    offset: bool
    factor_bits: int
    decode: Callable[[Bytes], tuple[Bytes, Factors, Factors | None]]

    @property
    def zero(self) -> int:
        """The code that stands for 0: 0 with offsets, else the middle."""
        return 0 if self.offset else 1 << self.bits - 1


def decode(kind: str, rows: Bytes) -> Blocks:
    """Decode a tensor's rows `[rows, bytes]` of a type in FORMATS."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    form, (_, size), count = FORMATS[kind], GGML_QUANT_SIZES[GGMLQuantizationType[kind]], len(rows)
    codes, scales, offsets = form.decode(np.ascontiguousarray(rows).reshape(-1, size))
    return Blocks(
        codes.reshape(count, -1, form.block),
        _by_row(scales, count),
        form.zero,
        None if offsets is None else _by_row(offsets, count),
    )


def _by_row(factors: Factors, rows: int) -> Factors:
    steps = None if factors.steps is None else factors.steps.reshape(rows, -1)
    dtype = np.float32 if steps is None else np.int8
    return Factors(factors.numbers.astype(dtype, copy=False).reshape(rows, -1), steps)


def _half(blocks: Bytes, at: int) -> Floats:
    """Return the float16 at a byte of each block, `[n, 1]`."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _fields(packed: Bytes, bits: int, width: int) -> Bytes:
    """Return the fields of so many bits in each `width` bytes: first the lowest of every byte, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    found = packed.reshape(len(packed), -1, 1, width) >> shifts & np.uint8((1 << bits) - 1)
    return np.asarray(found.reshape(len(packed), -1), dtype=np.uint8)


def _q4_0(blocks: Bytes) -> tuple[Bytes, Factors, None]:
    return _fields(blocks[:, 2:], 4, 16), Factors(_half(blocks, 0)), None


def _q4_1(blocks: Bytes) -> tuple[Bytes, Factors, Factors]:
    return _fields(blocks[:, 4:], 4, 16), Factors(_half(blocks, 0)), Factors(_half(blocks, 2))


def _fives(blocks: Bytes) -> Bytes:
    """Return codes of 5 bits from the last 20 bytes of blocks: four of highest bits, sixteen of the others."""
    high = np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little")
    return _fields(blocks[:, -16:], 4, 16) | high << np.uint8(4)


def _q5_0(blocks: Bytes) -> tuple[Bytes, Factors, None]:
    return _fives(blocks), Factors(_half(blocks, 0)), None


def _q5_1(blocks: Bytes) -> tuple[Bytes, Factors, Factors]:
    return _fives(blocks), Factors(_half(blocks, 0)), Factors(_half(blocks, 2))


def _q8_0(blocks: Bytes) -> tuple[Bytes, Factors, None]:
    return blocks[:, 2:] ^ np.uint8(128), Factors(_half(blocks, 0)), None


def _q2_k(blocks: Bytes) -> tuple[Bytes, Factors, Factors]:
    factors = blocks[:, :16]
    scales, lows = Factors(factors & 15, _half(blocks, 80)), Factors(factors >> 4, -_half(blocks, 82))
    return _fields(blocks[:, 16:80], 2, 32), scales, lows


def _q3_k(blocks: Bytes) -> tuple[Bytes, Factors, None]:
    high, factors = _fields(blocks[:, :32], 1, 32), blocks[:, 96:108]
    low = _fields(factors[:, :8], 4, 8) | _fields(factors[:, 8:], 2, 4) << 4
    scales = Factors(low.astype(np.int8) - np.int8(32), _half(blocks, 108))
    return _fields(blocks[:, 32:96], 2, 32) + (high << 2) + np.uint8(4), scales, None


def _factors(blocks: Bytes) -> tuple[Factors, Factors]:
    """Return the scales and lowest values of the eight blocks in a Q4_K or Q5_K: six bits each, in twelve bytes."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=1)
    lows = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=1)
    return Factors(scales, _half(blocks, 0)), Factors(lows, -_half(blocks, 2))


def _q4_k(blocks: Bytes) -> tuple[Bytes, Factors, Factors]:
    return _fields(blocks[:, 16:], 4, 32), *_factors(blocks)


def _q5_k(blocks: Bytes) -> tuple[Bytes, Factors, Factors]:
    high = _fields(blocks[:, 16:48], 1, 32)
    return _fields(blocks[:, 48:], 4, 32) + (high << 4), *_factors(blocks)


def _q6_k(blocks: Bytes) -> tuple[Bytes, Factors, None]:
    low, high = _fields(blocks[:, :128], 4, 64), _fields(blocks[:, 128:192], 2, 32)
    return low | high << np.uint8(4), Factors(blocks[:, 192:208].view(np.int8), _half(blocks, 208)), None


FORMATS = {
    "Q4_0": Format(4, 32, False, 16, _q4_0),
    "Q4_1": Format(4, 32, True, 16, _q4_1),
    "Q5_0": Format(5, 32, False, 16, _q5_0),
    "Q5_1": Format(5, 32, True, 16, _q5_1),
    "Q8_0": Format(8, 32, False, 16, _q8_0),
    "Q2_K": Format(4, 16, True, 8, _q2_k),
    "Q3_K": Format(4, 16, False, 8, _q3_k),
    "Q4_K": Format(4, 32, True, 8, _q4_k),
    "Q5_K": Format(5, 32, True, 8, _q5_k),
    "Q6_K": Format(6, 16, False, 8, _q6_k),
}
