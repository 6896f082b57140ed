"""Compares a GPU target's graph, run on this CPU, with Hugging Face, and measures what 16 bits change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.quantize.fp8_caches import Scales
from specbuild.builder.quantize.linears import simulated
from specbuild.builder.quantize.quality import Before, moved
from specbuild.builder.quantize.stage import Quantization

from .rounding import DTYPES, measure
from .standard_chain import graph_difference, graph_logits


@dataclass(frozen=True, slots=True)
class GraphCheck:
    """The distance of a graph's logits from PyTorch's; by default nothing is known.

    Attributes:
        difference: Largest difference in float32.
        bound: Gap between two logits below which 16 bits may choose differently.
        fp8_caches: What FP8 caches change, in nats per token.
        moved: What quantization changed, as `quality.moved` returns it.
    """

    difference: float | None = None
    bound: float = 0.0
    fp8_caches: dict[str, float] | None = None
    moved: dict[str, Any] = field(default_factory=dict)


def check_graph(
    graph: ir.Model,
    capacity: int,
    model: LayeredModel,
    dtype: str,
    references: Before,
    quantization: Quantization | None = None,
    scales: Scales | None = None,
) -> GraphCheck:
    """Compare a graph, run by ONNX Runtime in float32, with PyTorch, and measure how far `dtype` will be from that.

    Args:
        graph: The fused graph, with its quantized weights.
        capacity: Cache rows per slot.
        model: The model in float32.
        dtype: The type that the engine computes in.
        references: The model's logits of the check's texts.
        quantization: The model's quantized weights, if any.
        scales: Scales of FP8 caches, if any.

    Raises:
        ExecutionError: The graph, 16 bits or FP8 caches change the model too much.
    """
    found = quantization.numbers if quantization else {}
    held_out = quantization.before.texts if quantization and found else []
    with simulated(model, found) as changed:
        if found:
            references = Before(references.texts, changed.logits(references.texts))
        ours = graph_logits(graph, capacity, [*references.texts, *held_out])
        rounds = any(each.input_scale is not None for each in found.values())
        difference = graph_difference(ours[: len(references.texts)], references.logits, rounds)
        change = moved(quantization.before, ours[len(references.texts) :]) if quantization and found else {}
        if dtype not in DTYPES:
            return GraphCheck(difference, moved=change)
        rounded = measure(changed, dtype, references, scales)
    return GraphCheck(difference, 2 * rounded.gap, rounded.fp8_caches, change)
