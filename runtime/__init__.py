"""The runtime: loads a bundle and drives the draft/verify loop. Imports no torch, no transformers, no onnx.

from specbuild.runtime import Engine, SamplingParams

with Engine.load("pycode.bundle") as engine:
    print(engine.generate("def main(", SamplingParams(max_new_tokens=64))[0].text)

`specbuild.runtime.aio` has the twin for asyncio.
"""

from .bundle import Bundle
from .chat import Chat
from .engine import Engine
from .errors import SpecbuildError
from .handle import Handle
from .limits import Limits
from .logprobs import TokenLogprobs
from .manifest import Manifest
from .metrics import RequestMetrics, RunStats, SpeculationStats
from .result import Chunk, Result
from .sampling import SamplingParams
from .tokenizer import Prompt
from .tree import TreeSpec

__all__ = [
    "Bundle",
    "Chat",
    "Chunk",
    "Engine",
    "Handle",
    "Limits",
    "Manifest",
    "Prompt",
    "RequestMetrics",
    "Result",
    "RunStats",
    "SamplingParams",
    "SpecbuildError",
    "SpeculationStats",
    "TokenLogprobs",
    "TreeSpec",
]
