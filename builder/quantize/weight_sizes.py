"""How many bytes weights take in a bundle, by their shapes and schemes."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

from specbuild.builder.config.scheme import Scheme


def weight_bytes(
    shapes: Mapping[str, tuple[int, ...]], schemes: Mapping[str, Scheme], dtype: str, experts: Scheme | None = None
) -> int:
    """Return the bytes of a model's weights.

    Args:
        shapes: The shape of each weight by its name.
        schemes: The schemes of those that may be quantized, by their names without ".weight".
        dtype: The type of all other numbers.
        experts: The scheme of the weights of a mixture's experts; None if they are not quantized.
    """
    total, plain = 0, Scheme(dtype, dtype)
    for name, shape in shapes.items():
        scheme = experts if len(shape) == 3 else schemes.get(name.removesuffix(".weight"))
        total += prod(shape[:-1]) * (scheme or plain).row_bytes(shape[-1])
    return total


def saved_bytes(shapes: Mapping[str, tuple[int, ...]], schemes: Mapping[str, Scheme]) -> int:
    """Return the bytes of quantized weights in the files of calibrated layers: a byte for each code, at most."""
    each = {f"{name}.weight": scheme for name, scheme in schemes.items() if scheme.quantized}
    per_code = {name: 1 + 9 / (scheme.block or shapes[name][1]) for name, scheme in each.items() if name in shapes}
    return ceil(sum(bytes_ * prod(shapes[name]) for name, bytes_ in per_code.items()))
