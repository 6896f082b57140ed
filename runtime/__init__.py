"""The runtime: loads a bundle and drives the draft/verify loop. It imports no torch, no transformers and no onnx.

It exports the names in `public.py`. Each is imported on first use from the module that defines it, so that an engine
does not import asyncio. `specbuild` exports the names that every program needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *  # noqa: F403

_DEFINED = {
    "bundle.bundle": ("Bundle",),
    "bundle.manifest": ("Manifest",),
    "engine.async_engine": ("AsyncEngine",),
    "engine.engine": ("Engine",),
    "engine.handle": ("Handle",),
    "engine.health": ("Health", "Usage"),
    "engine.load_options": ("LoadOptions",),
    "engine.receipt": ("Receipt",),
    "engine.replay": ("Replay",),
    "errors": ("SpecbuildError",),
    "requests.chat": ("Chat",),
    "requests.chat_session": ("ChatSession",),
    "requests.metrics": ("RequestMetrics", "RunStats", "SpeculationStats"),
    "requests.result": ("Chunk", "Result"),
    "requests.tokenizer": ("Prompt",),
    "sampling.constraint": ("Constraint", "Matcher"),
    "sampling.logprobs": ("TokenLogprobs",),
    "sampling.parameters": ("SamplingParams",),
    "sampling.structured": ("StructuredOutputs",),
    "speculation.draft_limits": ("Limits",),
    "speculation.tree": ("TreeSpec",),
}
_PLACES = {name: module for module, names in _DEFINED.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use; importing a submodule triggers none of these imports."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
