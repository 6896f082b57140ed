"""How many bytes weights take in a bundle, by their shapes and schemes."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

from specbuild.builder.config.scheme import Scheme


def weight_bytes(
    shapes: Mapping[str, tuple[int, ...]], schemes: Mapping[str, Scheme], item: int, experts: Scheme | None = None
) -> int:
    """Return the bytes of a model's weights.

    Args:
        shapes: The shape of each weight by its name.
        schemes: The schemes of those that may be quantized, by their names without ".weight".
        item: Bytes of a number that is not quantized, and of a scale.
        experts: The scheme of the weights of a mixture's experts; None if they are not quantized.
    """
    total = 0
    for name, shape in shapes.items():
        scheme = experts if len(shape) == 3 else schemes.get(name.removesuffix(".weight"))
        total += _bytes((prod(shape[:-1]), shape[-1]) if len(shape) == 3 else shape, scheme, item)
    return total


def saved_bytes(shapes: Mapping[str, tuple[int, ...]], schemes: Mapping[str, Scheme]) -> int:
    """Return the bytes of quantized weights in the files of calibrated layers: a byte for each code, at most."""
    each = {f"{name}.weight": scheme for name, scheme in schemes.items() if scheme.quantized}
    per_code = {name: 1 + 9 / (scheme.block or shapes[name][1]) for name, scheme in each.items() if name in shapes}
    return ceil(sum(bytes_ * prod(shapes[name]) for name, bytes_ in per_code.items()))


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
