"""Lowerings: from the portable graph to what a backend compiles. This module is the registry, and light to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend: the module here that lowers for it, and the precisions it takes, the default one first."""

    module: str
    precisions: tuple[str, ...]


BOUND = 1e-4  # in logits: below such a gap two ways of computing the same in float32 may choose differently
BACKENDS: dict[str, BackendInfo] = {
    "onnxruntime": BackendInfo(".onnxruntime", ("fp32", "int8")),
    "onnxruntime-cuda": BackendInfo(".standard", ("fp16", "bf16", "fp32")),
    "tensorrt": BackendInfo(".plugin", ("fp16", "bf16", "fp32")),
    "tensorrt-rtx": BackendInfo(".standard", ("fp16", "bf16", "fp32")),
}
