"""The CPU executor: one ONNX Runtime session and one KV cache, with every tensor bound by address.

The lowered graph computes all sequences' nodes as one flat list of T nodes. Only attention is split into lanes, one per
cache slot, because ONNX Runtime's GroupQueryAttention takes one sequence if there are several new nodes over a past. A
lane may have more rows than nodes: the extra ones are copies of a node, and no node sees them. An exactness class needs
them, and so does a slot without an input: its lane takes part in every step with one row after its last used one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from specbuild.runtime.backends.exactness import MAX_ROWS, ExactnessClass
from specbuild.runtime.backends.executor import ModelSpec, StepInput
from specbuild.runtime.backends.onnx_graph import GraphFile, open_session
from specbuild.runtime.backends.slot_rows import SlotRows
from specbuild.runtime.errors import ExecutionError, one_line
from specbuild.runtime.speculation.timings import machine

from .kv_cache import KVCache
from .tensors import check_tensors

_ERRORS = 3  # ONNX Runtime's log severity; messages below it are for its developers
# The build has fused operators already, and ONNX Runtime's own QuickGelu is slower than what it replaces.
OPTIMIZATION = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
_MAX_PLANS = 256
# ONNX Runtime adds up products of more than WIDE columns in other blocks if there are at most SHORT rows, so a wide
# head's attention is computed over more rows than that from the first token on.
WIDE, SHORT = 128, 64
_Shape = tuple[tuple[int, int, int], ...]  # per lane: rows, nodes among them, wanted logits


@dataclass(slots=True)
class _Plan:
    """The tensors that steps of one shape read and write, besides the cache."""

    inputs: list[tuple[str, Any]]  # onnxruntime.OrtValues by name, over the arrays below
    outputs: list[tuple[str, Any]]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    logits: list[NDArray[np.float32]]  # per lane, `[wanted, V]`
    fed: NDArray[np.float32]  # hidden states that the model reads, `[1, T, H]`
    hidden: NDArray[np.float32]  # hidden states that it writes, `[1, T, H]`


class OrtExecutor:
    """See `Executor`: the cache is updated in place, plans share buffers, steps of known shapes allocate nothing."""

    buckets = None

    def __init__(self, graph: Path | GraphFile, spec: ModelSpec, batch_size: int, threads: int) -> None:
        self.exactness: ExactnessClass | None = None  # the class that steps are padded to
        self.spec, self.batch_size, self.seconds, self._threads = spec, batch_size, 0.0, threads
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = _ERRORS
        options.graph_optimization_level = OPTIMIZATION
        options.enable_mem_pattern = False  # it would keep one for every shape ever run
        self._session = open_session(graph, options, ["CPUExecutionProvider"])
        check_tensors(self._session, spec, batch_size)
        rows = spec.max_nodes + MAX_ROWS
        self._wide = spec.head_dim > WIDE and min(rows, spec.capacity - MAX_ROWS) >= SHORT + MAX_ROWS
        try:
            bias = batch_size, rows, spec.capacity
            self._cache = KVCache(spec.layers, batch_size, spec.kv_heads, spec.capacity, spec.head_dim)
            self._bias = {window: np.zeros(bias, dtype=np.float32) for window in spec.windows}  # zero between steps
            self._last_row = np.zeros((batch_size, 1), dtype=np.int32)
            self._logits = np.empty((batch_size * rows, spec.vocab_size), dtype=np.float32)
            self._rows = SlotRows(spec, batch_size)
            self._binding = self._session.io_binding()
            self._bind_cache()
        except MemoryError as error:
            raise ExecutionError(f"the {spec.name} does not fit into memory ({error}): load a smaller batch") from None
        self._plans: dict[_Shape, _Plan] = {}
        self._bound: _Plan | None = None

    def keep_to(self, exactness: ExactnessClass | None) -> None:
        """Pad every step to an exactness class from now on; None: do not pad."""
        self.exactness = exactness
        self._plans.clear()
        self._bound = None

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32]]:
        """Run one step; see `Executor.step`."""
        lanes = self._lanes(inputs)
        shape = self._shape(lanes)
        plan = self._plans.get(shape) or self._plan(shape)
        first, touched = 0, list[NDArray[np.float32]]()
        for lane, (rows, count, _) in zip(lanes, shape, strict=True):
            last = first + count
            plan.tokens[0, first:last] = lane.tokens
            plan.positions[0, first:last] = lane.positions
            if lane.hidden is not None:
                plan.fed[0, first:last] = lane.hidden
            if lane.start + len(lane.tokens) > self.spec.max_positions:  # a learned position table ends there
                np.minimum(plan.positions, self.spec.max_positions - 1, out=plan.positions)
            self._last_row[lane.slot, 0] = lane.start + rows - 1
            touched += self._hide(lane)
            first = last
        started = time.perf_counter()
        try:
            self._bind(plan)
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise ExecutionError(f"ONNX Runtime failed in a step: {one_line(error)}") from error
        finally:
            self.seconds += time.perf_counter() - started
            for region in touched:
                region.fill(0)
        first = 0
        for lane, (_, count, _) in zip(lanes, shape, strict=True) if self.spec.hidden else ():
            self._rows.hidden[lane.slot, lane.start : lane.start + count] = plan.hidden[0, first : first + count]
            first += count
        return [plan.logits[step_input.slot] for step_input in inputs]

    def _hide(self, lane: StepInput) -> list[NDArray[np.float32]]:
        """Set a lane's biases to −inf where a node does not see a row; return the regions to zero after the step."""
        nodes, end, touched = len(lane.tokens), lane.start + len(lane.tokens), []
        for window, bias in self._bias.items():
            if lane.visible is not None:
                tree = bias[lane.slot, :nodes, lane.committed : end]
                np.copyto(tree, -np.inf, where=~lane.visible)
                touched.append(tree)
            if 0 < window <= max(lane.positions, default=0):
                rows = bias[lane.slot, :nodes, :end]
                distance = np.asarray(lane.positions)[:, None] - self._rows.positions[lane.slot, :end]
                np.copyto(rows, -np.inf, where=distance >= window)
                touched.append(rows)
        return touched

    def _lanes(self, inputs: Sequence[StepInput]) -> list[StepInput]:
        """Record the rows of the inputs, and return an input for every slot: an idle one for a slot that has none."""
        for step_input in inputs:
            self._rows.write(step_input, self.spec.max_nodes)
        if len(inputs) == self.batch_size == 1:
            return list(inputs)
        lanes = [StepInput(slot, end, end, (), (), None, 0) for slot, end in enumerate(self._rows.ends)]
        for step_input in inputs:
            lanes[step_input.slot] = step_input
        return lanes

    def _shape(self, lanes: Sequence[StepInput]) -> _Shape:
        """Return each lane's rows, nodes and wanted logits in a step of the class; no node sees the extra rows."""
        rows = [self._filled(lane.start, len(lane.tokens)) for lane in lanes]
        if any(lane.start + count > self.spec.capacity for lane, count in zip(lanes, rows, strict=True)):
            raise ExecutionError(f"the {self.spec.name} has no rows to fill a step up: build the bundle again")
        return tuple((count, len(lane.tokens), lane.logits) for lane, count in zip(lanes, rows, strict=True))

    def _filled(self, start: int, count: int) -> int:
        """Return the attention rows of a lane with `count` nodes from row `start` on, as the class wants them."""
        if count and self.exactness and self._wide and start + count <= SHORT:
            count = SHORT + MAX_ROWS - start // MAX_ROWS * MAX_ROWS
        return max(1, count + -count % (self.exactness.sequence_rows if self.exactness else 1))

    def _bind_cache(self) -> None:
        """Bind the inputs and outputs that have the same address in every step."""
        for slot in range(self.batch_size):
            self._binding.bind_ortvalue_input(f"last_row.{slot}", _value(self._last_row[slot]))
            for layer in range(self.spec.layers):
                for value, kind in enumerate(("key", "value")):
                    rows = _value(self._cache.view(layer, bool(value), slot))
                    self._binding.bind_ortvalue_input(f"past_{kind}.{layer}.{slot}", rows)
                    self._binding.bind_ortvalue_output(f"present_{kind}.{layer}.{slot}", rows)

    def _bind(self, plan: _Plan) -> None:
        """Bind a plan's inputs and outputs, unless the last step used the same plan."""
        if plan is self._bound:
            return
        for name, value in plan.inputs:
            self._binding.bind_ortvalue_input(name, value)
        for name, value in plan.outputs:
            self._binding.bind_ortvalue_output(name, value)
        self._bound = plan

    def _plan(self, shape: _Shape) -> _Plan:
        """Make the inputs and outputs of a step shape, and keep them for later steps."""
        each, total = self.exactness.rows if self.exactness else 1, 0
        nodes, ends, attention_rows, node_rows = list[int](), list[int](), list[int](), list[int]()
        for rows, count, wanted in shape:
            node_rows += range(len(attention_rows), len(attention_rows) + count)
            last = max(total + count - 1, 0)
            attention_rows += [min(total + row, last) for row in range(rows)]
            total += count
            nodes += range(total - wanted, total)
            ends.append(len(nodes))
        nodes += [0] * max(not nodes, -len(nodes) % each)
        total += -total % each
        node_rows += [0] * (total - len(node_rows))
        tokens, positions = np.zeros((1, total), dtype=np.int64), np.zeros((1, total), dtype=np.int64)
        fed, hidden = (np.zeros((1, total, self.spec.hidden), dtype=np.float32) for _ in range(2))
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": tokens,
            "position_ids": positions,
            "logit_nodes": np.array(nodes, dtype=np.int64),
            "attention_rows": np.array(attention_rows, dtype=np.int64),
            "node_rows": np.array(node_rows, dtype=np.int64),
        }
        outputs = {"logits": self._logits[: len(nodes)][None]}
        if self.spec.reads_hidden:
            inputs["hidden_in"] = fed
        if self.spec.hidden:
            outputs["hidden"] = hidden
        if self.batch_size > 1:
            inputs["lane_sizes"] = np.array([rows for rows, _, _ in shape], dtype=np.int64)
        for slot, (rows, _, _) in enumerate(shape):
            for window, bias in self._bias.items():
                inputs[f"bias.{window}.{slot}"] = bias[slot, :rows][None, None]
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        read, written = ([(name, _value(array)) for name, array in each.items()] for each in (inputs, outputs))
        logits = [self._logits[first:end] for first, end in pairwise([0, *ends])]
        return self._plans.setdefault(shape, _Plan(read, written, tokens, positions, logits, fed, hidden))

    def commit(self, slot: int, rows: Sequence[int], start: int) -> None:
        """Move cache rows; see `Executor.commit`."""
        self._cache.gather(slot, rows, start)
        self._rows.commit(slot, rows, start)

    def copy(self, slot: int, source: int, rows: int) -> None:
        """Copy cache rows; see `Executor.copy`."""
        self._cache.copy(slot, source, rows)
        self._rows.copy(slot, source, rows)

    def hidden(self, slot: int) -> NDArray[np.float32]:
        """See `Executor.hidden`."""
        rows: NDArray[np.float32] = self._rows.hidden[slot]
        return rows

    def erase(self, slot: int) -> None:
        """See `Executor.erase`: nothing to clear, since rows past a node's own are never read here."""

    @property
    def identity(self) -> dict[str, Any]:
        """See `Executor.identity`."""
        return machine(self._threads)

    @property
    def cache_bytes(self) -> int:
        """Size of the cache in bytes, hidden states included."""
        return self._cache.nbytes + self._rows.hidden.nbytes

    def close(self) -> None:
        """Free the session and the cache."""
        self._plans.clear()
        del self._session, self._binding, self._bound, self._cache, self._rows


def _value(array: NDArray[Any]) -> Any:
    """Return ONNX Runtime's tensor over an array's memory; the tensor keeps the array alive."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
