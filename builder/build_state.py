"""One build under way: what it was asked for, what it found, and what it wrote so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.bundle.manifest import EngineRecord, FileRecord, KernelRecord, ModelRecord

from .codegen.emit import Stored
from .codegen.tensorrt import capacity_of
from .config.build_config import BuildConfig
from .frontend.eagle3_head import EagleHead
from .frontend.reference import Reference
from .lower.lanes import cache_width
from .prepare import Sources
from .quantize.calibrate import Found
from .quantize.fp8_caches import Scales
from .quantize.linears import Names
from .quantize.stage import Quantization
from .quantize.texts import Texts
from .targets import BOUND

Progress = Callable[[str], None]
Detail = Callable[[str, float], None]


@dataclass
class BuildState:
    """One build under way."""

    config: BuildConfig
    folder: Path
    progress: Progress
    detail: Detail
    source: Sources
    bound: float = BOUND
    graph_difference: float | None = None  # of the target's logits, for GPUs
    check_tokens: int = 0  # of output, per prompt of the check
    texts: Texts | None = None  # to calibrate with, and held out, where anything is quantized
    head: EagleHead | None = None  # the draft, where it is one, once the target is loaded
    names: dict[str, Names] = field(default_factory=dict)  # of the weights, where anything is quantized
    quantized: dict[str, Quantization] = field(default_factory=dict)  # by model
    stored: Stored = field(default_factory=dict)  # tensors that are in the bundle, where models share them
    scales: dict[str, Scales] = field(default_factory=dict)  # of FP8 caches, by model
    fp8_caches: dict[str, Any] | None = None  # what they change in the target
    references: list[Reference] = field(default_factory=list)
    reference_logits: list[NDArray[np.float32]] = field(default_factory=list)
    models: dict[str, ModelRecord] = field(default_factory=dict)
    kernels: dict[str, KernelRecord] = field(default_factory=dict)
    engines: dict[str, EngineRecord] = field(default_factory=dict)
    engine_reports: dict[str, Any] = field(default_factory=dict)  # by model
    kernel_report: dict[str, Any] | None = None
    matched: dict[str, dict[str, int]] = field(default_factory=dict)
    operators: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # per model and stage, how many
    products: dict[str, Any] = field(default_factory=dict)  # by model, what `specbuild profile` computes with
    seconds: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)  # hashed so far; nothing is written twice

    @property
    def capacity(self) -> int:
        """Cache rows of a slot; see `capacity_of`."""
        return capacity_of(self.config, self.source.max_seq_len)

    def found(self, model: str) -> Found:
        """A model's quantized weights by name, so far."""
        return self.quantized[model].found if model in self.quantized else {}

    def times_steps(self, model: str) -> bool:
        """Whether a model's steps are timed next to float32's: where it is quantized, and runs here."""
        return bool(self.found(model)) and self.config.backend == "onnxruntime"

    def spec(self, model: str, columns: int) -> ModelSpec:
        """Of a model as it is emitted for a CPU, whose logits have so many columns."""
        layout = self.source.layouts[model]
        shape = layout.layers, layout.kv_heads, cache_width(layout.head_dim), columns, self.capacity
        hidden = self.head.config.hidden_size if self.head else 0
        return ModelSpec(model, *shape, self.config.buckets[-1], tuple(sorted(set(layout.windows))), hidden=hidden)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce a stage, and note how long it took."""
        self.progress(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 3)
