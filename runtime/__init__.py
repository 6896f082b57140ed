"""The runtime: loads a bundle and drives the draft/verify loop. Imports no torch, no transformers, no onnx.

from specbuild.runtime import Engine, SamplingParams

with Engine.load("pycode.bundle") as engine:
    print(engine.generate("def main(", SamplingParams(max_new_tokens=64))[0].text)
"""

from .bundle import Bundle, Manifest
from .engine import Chunk, Engine, Prompt, Result
from .errors import SpecbuildError
from .metrics import RequestMetrics, RunStats, SpeculationStats
from .sampling import SamplingParams
from .tree import TreeSpec

__all__ = [
    "Bundle",
    "Chunk",
    "Engine",
    "Manifest",
    "Prompt",
    "RequestMetrics",
    "Result",
    "RunStats",
    "SamplingParams",
    "SpecbuildError",
    "SpeculationStats",
    "TreeSpec",
]
