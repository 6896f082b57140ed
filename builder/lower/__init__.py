"""Lowerings: from the portable graph to what a backend compiles. This module is the registry, and light to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend: the module here that lowers for it, and the precisions it takes."""

    module: str
    precisions: tuple[str, ...]
    bound: float  # below which gap, in logits, two ways of computing the same float32 logits may choose differently


BACKENDS: dict[str, BackendInfo] = {"onnxruntime": BackendInfo(".onnxruntime", ("fp32", "int8"), 1e-4)}
