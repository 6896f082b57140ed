"""specbuild's list of what TensorRT-RTX compiles for, as the stand-in's TensorRT-RTX lists it."""

import os
from dataclasses import replace

REAL = ("75", "80", "86", "89", "120", "121")  # of TensorRT-RTX 1.7
HERE = "90"  # the stand-in card, which the real one does not list


def listed():
    """What CARD_RTX_LISTS says ("75,80"), by default the real one's list and the stand-in."""
    asked = os.environ.get("CARD_RTX_LISTS")
    return tuple(asked.split(",")) if asked else tuple(sorted((*REAL, HERE), key=int))


def change(module):
    """The constant, and the backend that has it."""
    module.RTX_ARCHITECTURES = listed()
    rtx = module.BACKENDS["tensorrt-rtx"]
    module.BACKENDS["tensorrt-rtx"] = replace(rtx, architectures=module.RTX_ARCHITECTURES)
