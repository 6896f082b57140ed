"""The CPU executor: one ONNX Runtime session and one KV cache, with every tensor bound by address.

The lowered graph computes all sequences' nodes as one flat list of T nodes, each with its slot and cache row. Its
operators (`plugins/cpu`) write the cache in place, and give a node the bits that it has alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from specbuild.runtime.backends.executor import ModelSpec, StepInput
from specbuild.runtime.backends.onnx_graph import GraphFile, open_session
from specbuild.runtime.backends.slot_rows import SlotRows
from specbuild.runtime.errors import ExecutionError, one_line

from .kv_cache import KVCache
from .machine import machine
from .operators import register
from .tensors import check_tensors

_ERRORS = 3  # ONNX Runtime's log severity; messages below it are for its developers
# The build has fused operators already, and ONNX Runtime's own QuickGelu is slower than what it replaces.
OPTIMIZATION = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
_MAX_PLANS = 256
_Shape = tuple[int, int, int]  # nodes, columns of `visible`, wanted logits


@dataclass(slots=True)
class _Plan:
    """The tensors that steps of one shape read and write, besides the cache."""

    inputs: list[tuple[str, Any]]  # onnxruntime.OrtValues by name, over the arrays below
    outputs: list[tuple[str, Any]]
    tokens: NDArray[np.int64]  # [1, T]
    positions: NDArray[np.int64]  # [1, T]
    logit_nodes: NDArray[np.int64]  # [L]
    slots: NDArray[np.int32]  # [T]
    rows: NDArray[np.int32]  # [T]
    visible: NDArray[np.bool_]  # [T, W]
    logits: NDArray[np.float32]  # [L, V]
    fed: NDArray[np.float32]  # hidden states that the model reads, [1, T, H]
    hidden: NDArray[np.float32]  # hidden states that it writes, [1, T, H]


class OrtExecutor:
    """See `Executor`: the cache is updated in place, plans share buffers, steps of known shapes allocate nothing."""

    buckets = None

    def __init__(self, graph: Path | GraphFile, spec: ModelSpec, batch_size: int, threads: int) -> None:
        self.spec, self.batch_size, self.seconds, self._threads = spec, batch_size, 0.0, threads
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Else the threads of a target spin after its step, and its draft's step takes twice as long.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = _ERRORS
        options.graph_optimization_level = OPTIMIZATION
        options.enable_mem_pattern = False  # it would keep one for every shape ever run
        register(options)
        self._session = open_session(graph, options, ["CPUExecutionProvider"])
        check_tensors(self._session, spec)
        try:
            self._cache = KVCache(spec.shapes, batch_size, spec.capacity)
            self._committed = np.zeros(batch_size, dtype=np.int32)
            self._logits = np.empty((batch_size * spec.max_nodes, spec.vocab_size), dtype=np.float32)
            self._rows = SlotRows(spec, batch_size)
            self._binding = self._session.io_binding()
            self._bind_cache()
        except MemoryError as error:
            raise ExecutionError(f"the {spec.name} does not fit into memory ({error}): load a smaller batch") from None
        self._plans: dict[_Shape, _Plan] = {}
        self._bound: _Plan | None = None

    def step(self, inputs: Sequence[StepInput]) -> list[NDArray[np.float32]]:
        """Run one step; see `Executor.step`."""
        for step_input in inputs:
            self._rows.write(step_input, self.spec.max_nodes)
        plan = self._plan(inputs)
        ends = list(accumulate(len(step_input.tokens) for step_input in inputs))
        logit_ends = list(accumulate(step_input.logits for step_input in inputs))
        for step_input, (first, last), logit_end in zip(inputs, pairwise([0, *ends]), logit_ends, strict=True):
            self._fill(plan, step_input, first, last)
            plan.logit_nodes[logit_end - step_input.logits : logit_end] = range(last - step_input.logits, last)
        if not logit_ends[-1]:
            plan.logit_nodes[0] = 0  # a step has logits of a node at least
        np.minimum(plan.positions, self.spec.max_positions - 1, out=plan.positions)  # a learned table ends there
        started = time.perf_counter()
        try:
            self._bind(plan)
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            self._cache.state_rows.fill(0)  # some layers' states may have gone on
            raise ExecutionError(f"ONNX Runtime failed in a step: {one_line(error)}") from error
        finally:
            self.seconds += time.perf_counter() - started
        for step_input in inputs if self._cache.states else ():
            self._cache.state_rows[step_input.slot] = step_input.committed
        if self.spec.hidden:
            for step_input, (first, last) in zip(inputs, pairwise([0, *ends]), strict=True):
                self._rows.hidden[step_input.slot, step_input.start : step_input.start + last - first] = plan.hidden[
                    0, first:last
                ]
        return [plan.logits[first:last] for first, last in pairwise([0, *logit_ends])]

    def _fill(self, plan: _Plan, step_input: StepInput, first: int, last: int) -> None:
        """Write a sequence's nodes, which are `first` to `last` of the step's, into a plan."""
        plan.tokens[0, first:last] = step_input.tokens
        plan.positions[0, first:last] = step_input.positions
        plan.slots[first:last] = step_input.slot
        plan.rows[first:last] = range(step_input.start, step_input.start + last - first)
        self._committed[step_input.slot] = step_input.committed
        self._cache.rewind(step_input.slot, step_input.committed)
        before = step_input.start - step_input.committed
        seen = plan.visible[first:last]
        seen.fill(False)
        seen[:, : before + last - first] = (
            np.tri(last - first, before + last - first, before, dtype=np.bool_)
            if step_input.visible is None
            else step_input.visible
        )
        if step_input.hidden is not None:
            plan.fed[0, first:last] = step_input.hidden

    def _bind_cache(self) -> None:
        """Bind the inputs that have the same address in every step."""
        self._binding.bind_ortvalue_input("committed", _value(self._committed))
        if any(self.spec.windows):
            self._binding.bind_ortvalue_input("row_positions", _value(self._rows.positions))
        for at, view in enumerate(self._cache.views):
            self._binding.bind_ortvalue_input(f"{('keys', 'values')[at % 2]}.{at // 2}", _value(view))
        for layer, states in self._cache.states.items():
            self._binding.bind_ortvalue_input(f"states.{layer}", _value(states))
        if self._cache.states:
            self._binding.bind_ortvalue_input("state_rows", _value(self._cache.state_rows))

    def _bind(self, plan: _Plan) -> None:
        """Bind a plan's inputs and outputs, unless the last step used the same plan."""
        if plan is self._bound:
            return
        for name, value in plan.inputs:
            self._binding.bind_ortvalue_input(name, value)
        for name, value in plan.outputs:
            self._binding.bind_ortvalue_output(name, value)
        self._bound = plan

    def _plan(self, inputs: Sequence[StepInput]) -> _Plan:
        """Return the tensors for steps of this shape, which are kept for later ones."""
        nodes = sum(len(step_input.tokens) for step_input in inputs)
        width = max(step_input.start + len(step_input.tokens) - step_input.committed for step_input in inputs)
        shape = nodes, width, max(1, sum(step_input.logits for step_input in inputs))
        if shape not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[shape] = self._make_plan(*shape)
        return self._plans[shape]

    def _make_plan(self, nodes: int, width: int, logits: int) -> _Plan:
        plan = _Plan(
            inputs=[],
            outputs=[],
            tokens=np.zeros((1, nodes), dtype=np.int64),
            positions=np.zeros((1, nodes), dtype=np.int64),
            logit_nodes=np.zeros(logits, dtype=np.int64),
            slots=np.zeros(nodes, dtype=np.int32),
            rows=np.zeros(nodes, dtype=np.int32),
            visible=np.zeros((nodes, width), dtype=np.bool_),
            logits=self._logits[:logits],
            fed=np.zeros((1, nodes, self.spec.hidden), dtype=np.float32),
            hidden=np.zeros((1, nodes, self.spec.hidden), dtype=np.float32),
        )
        read: dict[str, NDArray[Any]] = {
            "input_ids": plan.tokens,
            "position_ids": plan.positions,
            "logit_nodes": plan.logit_nodes,
        }
        read |= {"slots": plan.slots, "rows": plan.rows, "visible": plan.visible}
        read |= {"hidden_in": plan.fed} if self.spec.reads_hidden else {}
        written: dict[str, NDArray[Any]] = {"logits": plan.logits[None]} | (
            {"hidden": plan.hidden} if self.spec.hidden else {}
        )
        plan.inputs, plan.outputs = ([(name, _value(each)) for name, each in all_.items()] for all_ in (read, written))
        return plan

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
