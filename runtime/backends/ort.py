"""ONNX Runtime on a CPU: one session, one cache, everything bound by address.

The lowered graph computes all sequences' nodes as one flat list of T nodes; only attention is split into lanes, one
per cache slot (ONNX Runtime's GroupQueryAttention takes one sequence where there are several new nodes over a past).
Every lane takes part in every step: a slot without a share runs one idle node in the row past its last one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ..cache import KVCache
from ..errors import BundleError, ExecutionError
from . import ModelSpec, Share

_ERRORS = 3  # ONNX Runtime's log severity: what it says below that is for its developers


class OrtExecutor:
    """See `Executor`; cache in place, biases reused, no allocation in a step but the views it returns."""

    def __init__(self, graph: Path, spec: ModelSpec, batch_size: int, threads: int) -> None:
        self.spec, self.batch_size, self.seconds = spec, batch_size, 0.0
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = _ERRORS
        try:
            self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises many unrelated types
            raise BundleError(f"{graph.name} does not load in ONNX Runtime {onnxruntime.__version__}: "
                              f"{_first_line(error)}") from error
        self._cache = KVCache(spec.layers, batch_size, spec.kv_heads, spec.capacity, spec.head_dim)
        self._io = self._session.io_binding()
        self._ends = [0] * batch_size  # per slot, the row past the last one in use
        self._buffers: list[NDArray[Any]] = []  # what was bound for good
        self._bias: list[NDArray[np.float32]] = []
        self._last_row: list[NDArray[np.int32]] = []
        self._logits = np.empty(0, dtype=np.float32)
        for slot in range(batch_size):
            self._bind_slot(slot)

    def _bind_slot(self, slot: int) -> None:
        for layer in range(self.spec.layers):
            for value, name in enumerate(("key", "value")):
                rows = self._cache.view(layer, bool(value), slot)
                self._bind_input(f"past_{name}.{layer}.{slot}", rows)
                self._bind_output(f"present_{name}.{layer}.{slot}", rows)
        self._last_row.append(np.zeros(1, dtype=np.int32))
        self._bind_input(f"last_row.{slot}", self._last_row[slot])
        self._bias.append(np.zeros((1, 1, 1, self.spec.capacity), dtype=np.float32))

    def _bind_input(self, name: str, array: NDArray[Any]) -> None:
        self._io.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def _bind_output(self, name: str, array: NDArray[Any]) -> None:
        self._io.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def step(self, shares: Sequence[Share]) -> list[NDArray[np.float32]]:
        """Run one step; see `Executor.step`."""
        lanes: list[Share] = [self._idle(slot) for slot in range(self.batch_size)]
        for share in shares:
            lanes[share.slot] = share
            self._ends[share.slot] = share.start + len(share.tokens)
        counts = [len(lane.tokens) for lane in lanes]
        tokens = np.array([[t for lane in lanes for t in lane.tokens]], dtype=np.int64)
        positions = np.array([[p for lane in lanes for p in lane.positions]], dtype=np.int64)
        wanted = [node for lane, end in zip(lanes, np.cumsum(counts), strict=True)
                  for node in range(end - lane.logits, end)]
        logit_nodes = np.array(wanted or [0], dtype=np.int64)
        logits = self._logits_buffer(len(logit_nodes))
        splits = np.array(counts, dtype=np.int64)
        self._bind_input("input_ids", tokens)
        self._bind_input("position_ids", positions)
        self._bind_input("logit_nodes", logit_nodes)
        self._bind_output("logits", logits[None])
        if self.batch_size > 1:
            self._bind_input("lane_sizes", splits)
        windows = [self._write_bias(lane) for lane in lanes]
        started = time.perf_counter()
        try:
            self._session.run_with_iobinding(self._io)
        except Exception as error:
            raise ExecutionError(f"ONNX Runtime failed in a step: {_first_line(error)}") from error
        self.seconds += time.perf_counter() - started
        for window in windows:
            if window is not None:
                window.fill(0)
        return self._split(logits, shares, lanes)

    def _split(
        self, logits: NDArray[np.float32], shares: Sequence[Share], lanes: Sequence[Share]
    ) -> list[NDArray[np.float32]]:
        """The rows of each share; lanes lie in slot order, shares as they came."""
        rows, start = {}, 0
        for lane in lanes:
            rows[lane.slot] = logits[start : start + lane.logits]
            start += lane.logits
        return [rows[share.slot] for share in shares]

    def _idle(self, slot: int) -> Share:
        end = self._ends[slot]
        return Share(slot, end, end, (0,), (0,), None, 0)

    def _write_bias(self, lane: Share) -> NDArray[np.float32] | None:
        """Point the lane at its rows; returns the part of the bias to reset afterwards, None for a chain."""
        nodes, capacity = len(lane.tokens), self.spec.capacity
        if lane.start + nodes > capacity:
            raise ExecutionError(f"rows {lane.start}…{lane.start + nodes} do not fit a cache of {capacity} rows")
        self._last_row[lane.slot][0] = lane.start + nodes - 1
        bias = self._bias[lane.slot]
        if bias.shape[2] < nodes:
            bias = self._bias[lane.slot] = np.zeros((1, 1, nodes, capacity), dtype=np.float32)
        bias = bias[:, :, :nodes]
        self._bind_input(f"bias.{lane.slot}", bias)
        if lane.visible is None:
            return None
        window = bias[0, 0, :, lane.committed : lane.start + nodes]
        np.copyto(window, -np.inf, where=~lane.visible)
        return window

    def _logits_buffer(self, rows: int) -> NDArray[np.float32]:
        size = rows * self.spec.vocab_size
        if self._logits.size < size:
            self._logits = np.empty(size, dtype=np.float32)
        return self._logits[:size].reshape(rows, self.spec.vocab_size)

    def commit(self, slot: int, rows: Sequence[int], start: int) -> None:
        """Move cache rows; see `Executor.commit`."""
        self._cache.gather(slot, rows, start)
        self._ends[slot] = start + len(rows)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache."""
        return self._cache.nbytes

    def close(self) -> None:
        """Free the session and the cache."""
        del self._io, self._session, self._cache


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
