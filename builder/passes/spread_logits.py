"""Spreads the logits of a head that lacks some tokens over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .pattern import constant, dims


def spread_logits(graph: ir.Graph, tokens: Sequence[int], vocab_size: int, others: float) -> None:
    """Widen the output `logits [B, L, columns]` to `[B, L, vocab_size]`, with column i at `tokens[i]`.

    Tokens without a column get the logit `others`.
    """
    (logits,) = (value for value in graph.outputs if value.name == "logits")
    place = graph.outputs.index(logits)
    columns = np.full(vocab_size, len(tokens), dtype=np.int64)
    columns[list(tokens)] = np.arange(len(tokens))
    pads = constant(graph, "one_more_column", np.array([0, 0, 0, 0, 0, 1], dtype=np.int64))
    lowest = constant(graph, "lowest", np.array(others, dtype=np.float32))
    pad = ir.node("Pad", [logits, pads, lowest])
    gather = ir.node("Gather", [pad.outputs[0], constant(graph, "columns", columns)], attributes={"axis": 2})
    graph.extend([pad, gather])
    (padded,), (spread,) = pad.outputs, gather.outputs
    spread.shape, spread.type = ir.Shape([*(dims(logits) or ())[:2], vocab_size]), logits.type
    padded.shape, padded.type = ir.Shape([*(dims(logits) or ())[:2], len(tokens) + 1]), logits.type
    logits.name, spread.name = "logits_of_columns", "logits"
    graph.outputs[place] = spread
