"""specbuild's list of what TensorRT-RTX compiles for, as the stand-in's TensorRT-RTX lists it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

REAL = ("75", "80", "86", "89", "120", "121")  # of TensorRT-RTX 1.7
HERE = "90"  # the stand-in card, which the real one does not list


def listed() -> tuple[str, ...]:
    """What CARD_RTX_LISTS says ("75,80"), by default the real one's list and the stand-in."""
    asked = os.environ.get("CARD_RTX_LISTS")
    return tuple(asked.split(",")) if asked else tuple(sorted((*REAL, HERE), key=int))


def change(module: Any) -> None:
    """The constant, and the backend that has it."""
    module.RTX_ARCHITECTURES = listed()
    rtx = module.BACKENDS["tensorrt-rtx"]
    module.BACKENDS["tensorrt-rtx"] = replace(rtx, architectures=module.RTX_ARCHITECTURES)
