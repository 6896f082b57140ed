"""Runs the fused graph in standard operators on this CPU, to check graphs whose engines cannot run here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from specbuild.builder.frontend.reference import References
from specbuild.builder.lower import standard
from specbuild.measure.divergence import divergences

from .bundle_check import raise_far

ROUNDING_DIVERGENCE = 1e-3  # nats per token, between two ways of computing with rounded inputs


@contextmanager
def standard_chain(graph: ir.Model, capacity: int) -> Iterator[Callable[[Sequence[int]], NDArray[np.float32]]]:
    """Yield a function that computes a text's logits, `float32[T, V]`, by the fused graph on this CPU.

    The graph runs in standard operators and float32; quantized products are computed as written, without fusion.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        ir.save(standard.lower(graph, "fp32", capacity), path, external_data="weights.bin")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # else it warns in every step that the cache is copied
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        # It removes a Relu in front of QuantizeLinear, which is wrong for E4M3, because that has negative numbers.
        wrong = ["ReluQuantRewrite"]
        session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"], disabled_optimizers=wrong)
        yield lambda text: _chain(session, text)


def graph_difference(
    compute: Callable[[Sequence[int]], NDArray[np.float32]], references: References, rounds: bool = False
) -> float:
    """Return the largest difference between PyTorch's logits and a `standard_chain`'s.

    Args:
        compute: The `standard_chain`.
        references: PyTorch's texts and logits.
        rounds: Whether inputs are rounded: a last bit may then move a number by a whole step, so that logits may
            differ as long as the KL divergence is small.

    Raises:
        ExecutionError: They differ by more than rounding.
    """
    ours = [compute(text) for text in references.texts]
    gap = max(float(np.abs(a - b).max()) for a, b in zip(ours, references.logits, strict=True))
    if not rounds or divergences(references.logits, ours).mean() > ROUNDING_DIVERGENCE:
        raise_far(gap, references.logits)
    return gap


def _chain(session: onnxruntime.InferenceSession, text: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits after each token of a text, from an empty cache: `float32[T, V]`."""
    nodes = np.arange(len(text), dtype=np.int32)
    feed: dict[str, Any] = {"input_ids": np.array([text], dtype=np.int32), "position_ids": nodes[None]}
    feed |= {"logit_nodes": nodes, "write_rows": np.zeros(1, dtype=np.int32)}
    for each in session.get_inputs():
        if each.name.startswith("past_"):
            feed[each.name] = np.zeros((1, *each.shape[1:]), dtype=np.float32)
        elif each.name.startswith("mask."):
            distance, window = nodes[:, None] - np.arange(each.shape[3]), int(each.name.removeprefix("mask."))
            feed[each.name] = ((distance >= 0) & (distance < (window or len(text))))[None, None]
    logits: NDArray[np.float32] = session.run(["logits"], feed)[0][0]
    return logits
