"""The runtime: loads a bundle and drives the draft/verify loop. Imports no torch, no transformers, no onnx.

from specbuild.runtime import Engine, SamplingParams

with Engine.load("pycode.bundle") as engine:
    print(engine.generate("def main(", SamplingParams(max_new_tokens=64))[0].text)

`specbuild.runtime.aio` has the twin for asyncio.
"""

from .bundle.bundle import Bundle
from .bundle.manifest import Manifest
from .engine.engine import Engine
from .engine.handle import Handle
from .errors import SpecbuildError
from .requests.chat import Chat
from .requests.metrics import RequestMetrics, RunStats, SpeculationStats
from .requests.result import Chunk, Result
from .requests.tokenizer import Prompt
from .sampling.logprobs import TokenLogprobs
from .sampling.sampler import SamplingParams
from .speculation.draft_limits import Limits
from .speculation.tree import TreeSpec

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
