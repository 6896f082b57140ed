"""The runtime: loads a bundle and drives the draft/verify loop. Imports no torch, no transformers, no onnx.

The names below are imported when they are first used. `specbuild` itself has those that every program needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import SpecbuildError as SpecbuildError

if TYPE_CHECKING:
    from .bundle.bundle import Bundle as Bundle
    from .bundle.manifest import Manifest as Manifest
    from .engine.async_engine import AsyncEngine as AsyncEngine
    from .engine.engine import Engine as Engine
    from .engine.handle import Handle as Handle
    from .requests.chat import Chat as Chat
    from .requests.metrics import RequestMetrics as RequestMetrics
    from .requests.metrics import RunStats as RunStats
    from .requests.metrics import SpeculationStats as SpeculationStats
    from .requests.result import Chunk as Chunk
    from .requests.result import Result as Result
    from .requests.tokenizer import Prompt as Prompt
    from .sampling.logprobs import TokenLogprobs as TokenLogprobs
    from .sampling.sampler import SamplingParams as SamplingParams
    from .speculation.draft_limits import Limits as Limits
    from .speculation.tree import TreeSpec as TreeSpec

_HOMES = {  # where each name is defined
    "bundle.bundle": ("Bundle",),
    "bundle.manifest": ("Manifest",),
    "engine.async_engine": ("AsyncEngine",),
    "engine.engine": ("Engine",),
    "engine.handle": ("Handle",),
    "requests.chat": ("Chat",),
    "requests.metrics": ("RequestMetrics", "RunStats", "SpeculationStats"),
    "requests.result": ("Chunk", "Result"),
    "requests.tokenizer": ("Prompt",),
    "sampling.logprobs": ("TokenLogprobs",),
    "sampling.sampler": ("SamplingParams",),
    "speculation.draft_limits": ("Limits",),
    "speculation.tree": ("TreeSpec",),
}
__all__ = sorted(["SpecbuildError", *(name for names in _HOMES.values() for name in names)])


def __getattr__(name: str) -> Any:
    """A public name, from where it is defined."""
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
