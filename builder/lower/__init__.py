"""Lowerings: from the portable graph to what a backend compiles. This module is the registry, and light to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A backend: the module here that lowers for it, and the precisions it takes."""

    module: str
    precisions: tuple[str, ...]
    bounds: tuple[float, ...]  # exactness bound per precision, in logits

    def bound(self, precision: str) -> float:
        """Below which gap two ways of computing the same logits may choose differently."""
        return self.bounds[self.precisions.index(precision)]


BACKENDS: dict[str, BackendInfo] = {"onnxruntime": BackendInfo(".onnxruntime", ("fp32", "int8"), (1e-4, 1e-1))}
