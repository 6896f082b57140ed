"""How many bytes weights take in a bundle, by their shapes and schemes."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

from specbuild.builder.config.scheme import Scheme


def weight_bytes(shapes: Mapping[str, tuple[int, ...]], schemes: Mapping[str, Scheme], item: int) -> int:
    """Return the bytes of a model's weights.

    Args:
        shapes: The shape of each weight by its name.
        schemes: The schemes of those that may be quantized, by their names without ".weight".
        item: Bytes of a number that is not quantized, and of a scale.
    """
    return sum(_bytes(shape, schemes.get(name.removesuffix(".weight")), item) for name, shape in shapes.items())


def _bytes(shape: tuple[int, ...], scheme: Scheme | None, item: int) -> int:
    if scheme is None or not scheme.quantized or len(shape) != 2:
        return item * prod(shape)
    rows, columns = shape
    blocks = ceil(columns / scheme.block) if scheme.block else 1
    scales = 1 if scheme.per_tensor else rows * blocks
    zero_point = 1 if scheme.bits < 8 else item
    factors = item if scheme.symmetric else item + zero_point
    padded = rows * blocks * (scheme.block or columns)
    return padded * scheme.bits // 8 + factors * scales
