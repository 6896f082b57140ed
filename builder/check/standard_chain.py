"""Runs the fused graph in standard operators on this CPU, to check graphs whose engines cannot run here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from specbuild.builder.lower import standard
from specbuild.builder.lower.parts import part_of
from specbuild.builder.passes.pattern import dims, numbers_of
from specbuild.measure.divergence import divergences

from .bundle_check import raise_far

ROUNDING_DIVERGENCE = 1e-3  # nats per token, between two ways of computing with rounded inputs
Arrays = dict[ir.Value, NDArray[Any]]


def graph_logits(graph: ir.Model, capacity: int, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """Return the logits after each token of texts, `float32[T, V]` each, computed by the fused graph on this CPU.

    The graph runs in standard operators and float32, a layer at a time, whose weights alone are in memory; quantized
    products are computed as written, without fusion.
    """
    model = standard.lower(graph, "fp32", capacity)
    (logits,) = (value for value in model.graph.outputs if value.name == "logits")
    values = [_inputs(model, text) for text in texts]
    uses = {value: [use.node for use in value.uses()] for node in model.graph for value in node.outputs}
    left = set(model.graph)
    for nodes in _layers(model.graph):
        left -= set(nodes)
        part = part_of(model, nodes, [logits])
        session = _session(part.graph)
        weights = {v: numbers_of(v) for v in part.inputs if v.is_initializer()}
        for each in values:
            fed = [weights[v] if v in weights else _input(v, each) for v in part.inputs]
            names = [str(v.name) for v in part.graph.graph.outputs]
            made = session.run(names, dict(zip((str(v.name) for v in part.graph.graph.inputs), fed, strict=True)))
            each |= zip(part.outputs, made, strict=True)
            for value, array in zip(part.outputs, made, strict=True):
                value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))  # which a lowered graph may not say
            for value in [v for v in each if v in uses and v is not logits and left.isdisjoint(uses[v])]:
                del each[value]
    return [each[logits][0] for each in values]


def graph_difference(
    ours: Sequence[NDArray[np.float32]], exact: Sequence[NDArray[np.float32]], rounds: bool = False
) -> float:
    """Return the largest difference between a graph's logits and PyTorch's, `exact`.

    Args:
        ours: The graph's logits of each text.
        exact: PyTorch's.
        rounds: Whether inputs are rounded: a last bit may then move a number by a whole step, so that logits may
            differ as long as the KL divergence is small.

    Raises:
        ExecutionError: They differ by more than rounding.
    """
    gap = max(float(np.abs(a - b).max()) for a, b in zip(ours, exact, strict=True))
    if not rounds or divergences(exact, ours).mean() > ROUNDING_DIVERGENCE:
        raise_far(gap, exact)
    return gap


def _layers(graph: ir.Graph) -> Iterator[list[ir.Node]]:
    """Yield a graph's nodes up to each attention, and those after the last."""
    nodes = list[ir.Node]()
    for node in graph:
        nodes.append(node)
        if str(node.name).startswith("attention."):
            yield nodes
            nodes = []
    yield nodes


def _session(part: ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # else it warns in every step that the cache is copied
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    # It removes a Relu in front of QuantizeLinear, which is wrong for E4M3, because that has negative numbers.
    wrong = ["ReluQuantRewrite"]
    data = ir.to_proto(part).SerializeToString()
    return onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"], disabled_optimizers=wrong)


def _inputs(model: ir.Model, text: Sequence[int]) -> Arrays:
    """Return a model's inputs for a text and an empty cache, but for the cache itself."""
    nodes = np.arange(len(text), dtype=np.int32)
    feed: dict[str, NDArray[Any]] = {"input_ids": np.array([text], dtype=np.int32), "position_ids": nodes[None]}
    feed |= {"logit_nodes": nodes, "write_rows": np.zeros(1, dtype=np.int32)}
    for value in model.graph.inputs:
        name = str(value.name)
        if name.startswith("mask."):
            distance = nodes[:, None] - np.arange(dims(value)[3])  # type: ignore[index]
            window = int(name.removeprefix("mask."))
            feed[name] = ((distance >= 0) & (distance < (window or len(text))))[None, None]
    return {value: feed[str(value.name)] for value in model.graph.inputs if value.name in feed}


def _input(value: ir.Value, values: Arrays) -> NDArray[Any]:
    """Return a value that a part reads; a cache is empty."""
    if value in values:
        return values[value]
    return np.zeros((1, *(dims(value) or ())[1:]), dtype=np.float32)
