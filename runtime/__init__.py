"""The runtime: loads a bundle and drives the draft/verify loop. Imports no torch, no transformers, no onnx.

Its names are those of `public.py`, imported when the first of them is used. `specbuild` has those every program needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """A public name; importing a module of this package asks for none."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".public", __name__), name)
