"""What can be built for: backends, architectures and head sizes."""

from __future__ import annotations

from collections.abc import Iterable

from specbuild.runtime.errors import OptionError

BOUND = 1e-4  # in logits: below such a gap two ways of computing the same in float32 may choose differently
BACKENDS = {  # by name, the module of `lower` that lowers for it
    "onnxruntime": "onnxruntime",
    "onnxruntime-cuda": "standard",
    "tensorrt": "plugin",
    "tensorrt-rtx": "standard",
}
ARCHITECTURES = ("80", "86", "87", "89", "90a", "100a", "110", "120", "121")
COMPATIBLE = ("80", "90a", "100a", "120")  # GPUs from 8.0 on run one of them, but for 8.7, 10.3 and 11.0
HEAD_DIMS = (64, 80, 96, 128, 256)  # that the kernels have


def split_names(wanted: Iterable[str]) -> list[str]:
    """`["90a,89", "sm_80"]` → the names one by one, without their prefix."""
    return [part.strip().removeprefix("sm_") for text in wanted for part in text.split(",")]


def architectures(wanted: Iterable[str]) -> tuple[str, ...]:
    """`["90a,89", "sm_80"]` or `["all"]` → the architectures, each once; raises OptionError for one unsupported.

    "90" and "100" are what the GPUs are called; their kernels use what only "90a" and "100a" have.
    """
    names = [f"{name}a" if f"{name}a" in ARCHITECTURES else name for name in split_names(wanted)]
    for name in names:
        if name not in (*ARCHITECTURES, "all"):
            asked = f"sm_{name} is not supported" if name else "an architecture is empty"
            raise OptionError(f"{asked}: use {', '.join(ARCHITECTURES)}, or all")
    return ARCHITECTURES if "all" in names else tuple(dict.fromkeys(names))
