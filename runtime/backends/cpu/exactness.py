"""Finds the exactness class of a model on this machine: the cheapest whose steps agree in every bit."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from specbuild.runtime.backends.agreement import agree
from specbuild.runtime.backends.exactness import CANDIDATES, ExactnessClass

from .executor import OrtExecutor

_CPUINFO = Path("/proc/cpuinfo")
_VECTOR_UNITS = ("amx", "avx", "fma", "sse4", "asimd", "sve", "sme", "i8mm", "bf16", "fphp")


def find(executor: OrtExecutor, first: ExactnessClass | None = None) -> ExactnessClass | None:
    """The class of an executor, with its digest, which is padded to it from then on; None where no candidate holds.

    Its slots must be free, and hold nothing that counts afterwards. It takes the time of about 1,000 tokens. `first`:
    what is tried before the others, in fewer places: the class of another graph of the model.
    """
    for candidate in ([first] if first else []) + list(CANDIDATES):
        executor.keep_to(candidate)
        logits = agree(executor, every=4 if candidate is first else 1)
        if logits is not None:
            executor.keep_to(replace(candidate, digest=hashlib.sha256(logits.tobytes()).hexdigest()))
            return executor.exactness
    executor.keep_to(None)
    return None


def machine_of(executor: OrtExecutor) -> dict[str, str | int]:
    """What the class and the bits depend on: processor, vector units, threads, library."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    units = " ".join(sorted(flag for flag in flags if flag.startswith(_VECTOR_UNITS)))
    return {**executor.identity, "vector_units": units}
