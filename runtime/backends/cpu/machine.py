"""The machine for which a CPU's times are valid."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

_CPUINFO = Path("/proc/cpuinfo")


def machine(threads: int) -> dict[str, Any]:
    """Return what times are valid for: a processor, how many of its threads, and the library that computes."""
    import onnxruntime  # whoever calls this has it installed

    return {"processor": processor(), "threads": threads, "onnxruntime": onnxruntime.__version__}


def processor() -> str:
    """Return the processor's name, or what the system says of it."""
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, platform.processor() or platform.machine())
