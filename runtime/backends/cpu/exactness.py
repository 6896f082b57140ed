"""Find the exactness class of a model on this machine: the cheapest one whose steps agree bitwise."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from specbuild.runtime.backends.agreement import agree, agree_far
from specbuild.runtime.backends.exactness import CANDIDATES, ExactnessClass

from .executor import OrtExecutor

_CPUINFO = Path("/proc/cpuinfo")
_VECTOR_UNITS = ("amx", "avx", "fma", "sse4", "asimd", "sve", "sme", "i8mm", "bf16", "fphp")


def find(executor: OrtExecutor, first: ExactnessClass | None = None) -> ExactnessClass | None:
    """Find the exactness class of an executor, and keep its steps to it; None if no candidate holds.

    All slots must be free; their contents are overwritten. This takes as long as about 1,000 tokens. The class returned
    has its digest.

    Args:
        executor: The executor to test, which pads its steps to the class afterwards.
        first: Candidate to test before the others, at fewer places: the class of another graph of the model.
    """
    for candidate in ([first] if first else []) + list(CANDIDATES):
        executor.keep_to(candidate)
        every = 4 if candidate is first else 1
        logits = agree(executor, every=every)
        if logits is not None and agree_far(executor, every):
            executor.keep_to(replace(candidate, digest=hashlib.sha256(logits.tobytes()).hexdigest()))
            return executor.exactness
    executor.keep_to(None)
    return None


def machine_of(executor: OrtExecutor) -> dict[str, str | int]:
    """Return what the class and the bits depend on: processor, its units, threads, ONNX Runtime and its attention."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    units = " ".join(sorted(flag for flag in flags if flag.startswith(_VECTOR_UNITS)))
    return {**executor.identity, "vector_units": units, "flash_attention": 0}
