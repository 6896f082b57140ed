"""Lowerings: from the portable graph to what a backend compiles. This module is the registry, and light to import."""

from __future__ import annotations

BOUND = 1e-4  # in logits: below such a gap two ways of computing the same in float32 may choose differently
BACKENDS = {  # by name, the module here that lowers for it
    "onnxruntime": ".onnxruntime",
    "onnxruntime-cuda": ".standard",
    "tensorrt": ".plugin",
    "tensorrt-rtx": ".standard",
}
