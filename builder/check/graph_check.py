"""The target's graph for a GPU, as this CPU computes it, held against Hugging Face; and what 16 bits change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
from transformers import PreTrainedModel

from specbuild.builder.frontend.reference import References, text_logits
from specbuild.builder.quantize.fp8_caches import Scales
from specbuild.builder.quantize.linears import simulated
from specbuild.builder.quantize.quality import moved
from specbuild.builder.quantize.stage import Quantization

from .rounding import DTYPES, measure
from .standard_chain import graph_difference, standard_chain


@dataclass(frozen=True, slots=True)
class GraphCheck:
    """How far the logits are from PyTorch's, and how near 16 bits make two choices; by default nothing is known.

    `fp8_caches`: what those change, nats a token. `moved`: what quantization did, as `quality.moved` says it.
    """

    difference: float | None = None
    bound: float = 0.0
    fp8_caches: dict[str, float] | None = None
    moved: dict[str, Any] = field(default_factory=dict)


def check_graph(
    graph: ir.Model,
    capacity: int,
    model: PreTrainedModel,
    dtype: str,
    references: References,
    quantization: Quantization | None = None,
    scales: Scales | None = None,
) -> GraphCheck:
    """Run a graph by ONNX Runtime in float32, and measure how far `dtype` will be from that.

    model: in float32, which it is computed by; of `dtype` afterwards. scales: over FP8 caches. Raises ExecutionError
    where the graph, 16 bits or the caches make another model of it.
    """
    found = quantization.found if quantization else {}
    with simulated(model, found):
        if found:
            references = replace(references, logits=[text_logits(model, text) for text in references.texts])
        with standard_chain(graph, capacity) as chain:
            rounds = any(each.input_scale is not None for each in found.values())
            difference = graph_difference(chain, references, rounds)
            change = moved(quantization.before, chain) if quantization and found else {}
        if dtype not in DTYPES:
            return GraphCheck(difference, moved=change)
        rounded = measure(model, dtype, references, scales)
    return GraphCheck(difference, 2 * rounded.gap, rounded.fp8_caches, change)
