"""Compares precisions for a build that is to choose its target's: each is evaluated, lowered and timed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx_ir as ir

from specbuild.runtime.backends.executor import ModelSpec

from . import passes
from .build_context import BuildContext
from .check.step_times import PLAIN, save_plain, step_times
from .frontend.layer_by_layer import LayeredModel
from .quantize.calibrate import NumbersByName
from .quantize.comparison import EXACT, Steps, best, compare, to_dict
from .quantize.kinds import kinds
from .quantize.linears import Names
from .quantize.quality import Before
from .quantize.rewrite import Quantize
from .quantize.sensitivity import stored

NODES = (1, 2, 8, 32)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidate precisions of a target that runs on a CPU; `graph` is its portable graph, not quantized."""

    context: BuildContext
    model: LayeredModel
    graph: ir.Model
    names: Names

    def best(
        self, named: NumbersByName, found: Mapping[str, NumbersByName], before: Before
    ) -> tuple[NumbersByName, dict[str, Any]]:
        """Return the quantized weights that best meet the request, and the report's comparison (`stage.Comparing`).

        Args:
            named: Quantized weights that the options name; the float32 candidate has these only.
            found: Quantized weights of every other candidate, by precision.
            before: What the float32 model computes on the held-out texts.
        """
        config, source = self.context.config, self.context.source
        wanted, every = config.precision_of("target"), {EXACT: named, **found}
        texts = {"texts": before}
        for kind, each in kinds(source.target.tokenizer, source.max_seq_len - 1).items():
            texts[kind] = Before(each, self.model.logits(each))
        sizes = {name: stored(each, self.model, self.names.weights) for name, each in every.items()}
        rows = compare(self.model, every, sizes, texts, self._time)
        chosen = best(rows, wanted, config.max_kl)
        return every[chosen.precision], to_dict(rows, wanted, chosen)

    def _time(self, every: Mapping[str, NumbersByName]) -> dict[str, Steps]:
        """Return the milliseconds of each candidate's steps; the candidates take turns."""
        largest = self.context.config.buckets[-1]
        with TemporaryDirectory() as scratch:
            files = {
                name: self._lowered(found, Path(scratch) / str(at)) for at, (name, found) in enumerate(every.items())
            }
            return step_times(files, self._spec(largest), largest, NODES)

    def _lowered(self, found: NumbersByName, folder: Path) -> Path:
        graph = self.graph.clone()
        if found:
            Quantize(found, self.names)(graph)
            passes.clean(graph)
        folder.mkdir()
        save_plain(graph, self.context.capacity, folder)
        return folder / PLAIN

    def _spec(self, largest: int) -> ModelSpec:
        layout, vocabulary = self.context.source.layouts["target"], self.context.source.target.token_rows
        shape = layout.spec | {"vocab_size": vocabulary, "capacity": self.context.capacity}
        return ModelSpec("target", **shape, max_nodes=largest)
