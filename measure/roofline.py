"""Rooflines: the bytes and FLOPs that a model's step needs at least, against what the device can do.

A step reads the weights once and the cached keys and values that its nodes attend to, writes the nodes' own cache rows
and logits, and multiplies. States are read, advanced and written. Embedding lookups and a kernel's temporary memory are
not counted. In a mixture of experts a step reads as many experts as its nodes can choose at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from specbuild.runtime.backends.cpu.cores import cores
from specbuild.runtime.backends.executor import Executor, StepInput
from specbuild.runtime.backends.gpu.cuda import Cuda
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.bundle.manifest import ModelRecord
from specbuild.runtime.bundle.memory_plan import item_bytes
from specbuild.runtime.decoding.loop import Loop

_TIMES = 10  # repetitions of each measurement of the device; the best counts
_WARM = 3e-3  # seconds for which a step is repeated before it is timed
_LONG = 0.05  # seconds from which a step needs no warm-up
_NODE_BYTES, _LOGIT_BYTES = 8, 4  # token and position; float32
_STATE_PRODUCTS = 4  # of a node with each number of a state: decay, what is known, change, output
Bound = Literal["memory", "compute", "unknown"]


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention layers of one shape: window (0: unlimited), query heads, numbers of a cached row, number of layers."""

    window: int
    heads: int
    row: int
    layers: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Matrix products by `chosen` of `count` experts: one expert's parameters and bytes, and the number of products."""

    count: int
    chosen: int
    parameters: int
    bytes: int
    products: int


@dataclass(frozen=True, slots=True)
class Products:
    """A graph's matrix products.

    `parameters`: multiply-adds per node; `bytes`: weights that every step reads; both without the experts.
    """

    parameters: int
    bytes: int
    head_dim: int
    attention: tuple[Attention, ...]
    experts: tuple[Experts, ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Products:
        """Return the products from their fields in report.json."""
        attention = tuple(Attention(**each) for each in fields["attention"])
        experts = tuple(Experts(**each) for each in fields["experts"])
        return cls(fields["parameters"], fields["bytes"], fields["head_dim"], attention, experts)

    def step(
        self, record: ModelRecord, batch: int, nodes: int, rows: int, cache_bytes: int | None = None
    ) -> tuple[int, int]:
        """Return the bytes and FLOPs of a step that computes the logits of every node.

        Args:
            record: The model's record in the manifest.
            batch: Sequences in the step.
            nodes: Nodes of each sequence, a chain.
            rows: Committed rows in each sequence's cache.
            cache_bytes: Bytes per number in the KV cache; None for the model's own type.
        """
        new = batch * nodes
        item = cache_bytes or item_bytes(record.precision)
        moved = self.bytes + new * (record.vocab_size * _LOGIT_BYTES + _NODE_BYTES)
        moved += 2 * batch * record.state_values * item
        products = new * (self.parameters + _STATE_PRODUCTS * record.state_values)
        for experts in self.experts:
            moved += experts.products * experts.bytes * min(experts.count, experts.chosen * new)
            products += experts.products * experts.parameters * experts.chosen * new
        for each in self.attention:
            window = each.window or math.inf
            moved += int(batch * each.layers * each.row * item * (min(rows, window - 1) + nodes))
            seen = sum(min(rows + node + 1, window) for node in range(nodes))
            products += int(batch * each.layers * each.heads * 2 * self.head_dim * seen)
        return moved, 2 * products


@dataclass(frozen=True, slots=True)
class Roofline:
    """A measured step compared with the device's bandwidth (bytes/s) and peak (FLOP/s; None: unknown)."""

    bytes: int
    flops: int
    seconds: float
    bandwidth: float
    peak_flops: float | None

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def bound(self) -> Bound:
        """Return what bounds the step: moving its bytes ("memory") or computing ("compute")."""
        if self.peak_flops is None:
            return "unknown"
        return "memory" if self.bytes / self.bandwidth >= self.flops / self.peak_flops else "compute"

    @property
    def least_seconds(self) -> float:
        """The minimum seconds that the device needs; without a known peak, those to move the bytes."""
        return max(self.bytes / self.bandwidth, self.flops / self.peak_flops if self.peak_flops else 0.0)

    @property
    def share(self) -> float:
        """The minimum time divided by the measured one; above 1 if a processor cache holds weights."""
        return self.least_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the step, its minimum time and its rates for JSON, times in seconds."""
        rates = {f"{name}_per_second": getattr(self, name) / self.seconds for name in ("bytes", "flops")}
        names = "bytes", "flops", "seconds", "least_seconds", "share", "bound"
        return {name: getattr(self, name) for name in names} | {"flops_per_byte": self.intensity} | rates


def measure_device(executor: Executor, precision: str) -> tuple[float, float | None]:
    """Measure the bandwidth in bytes/s and the peak in FLOP/s of the device on which a model runs.

    A GPU's bandwidth is that of copies; its peak is None, unknown. A CPU's bandwidth, with all cores working, is that
    of copying or of reading alone, whichever is higher. Its peak is that of a float32 matrix product, and None if
    `precision` is not "fp32".
    """
    if isinstance(executor, StandardExecutor) and isinstance(executor.device, Cuda):
        return executor.device.measure_bandwidth(), None
    return cpu_bandwidth(), cpu_peak() if precision == "fp32" else None


def cpu_bandwidth(size: int = 1 << 26) -> float:
    """Measure the bytes per second read and written; each core has two arrays of `size` bytes, too large to cache."""
    count = cores()
    pairs = [np.ones((2, size // 4), dtype=np.float32) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        copied = _best(lambda: list(pool.map(lambda pair: np.copyto(pair[0], pair[1]), pairs)))
        read = _best(lambda: list(pool.map(lambda pair: pair.max(), pairs)))
    return sum(pair.nbytes for pair in pairs) / min(copied, read)


def cpu_peak(size: int = 1024) -> float:
    """Measure the FLOP/s of NumPy's product of two float32 matrices `[size, size]`."""
    left, right = np.ones((2, size, size), dtype=np.float32)
    return 2 * size**3 / _best(lambda: left @ right)


def _best(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


class Steps:
    """Timer of the steps of a loop's models, keyed by ("target" or "draft", nodes), all slots after `rows` cached rows.

    A turn times every step once, so that other load on the machine meets all of them, and each step runs after others
    of similar size, as in a text's rounds. Slots must be free.
    """

    def __init__(self, loop: Loop, wanted: Iterable[tuple[str, int]], rows: int) -> None:
        executors = {"target": loop.target, "draft": loop.draft_executor}
        self._loop, self._runs = loop, dict[tuple[str, int], Callable[[], float]]()
        for name, nodes in wanted:
            if executor := executors[name]:
                self._runs[name, nodes] = timed_step(executor, nodes, rows)
        self._seconds: dict[tuple[str, int], list[float]] = {key: [] for key in self._runs}

    def turn(self) -> None:
        """Time every step once more."""
        for key, run in self._runs.items():
            warm = 0.0 if min(self._seconds[key], default=0.0) < _LONG else _WARM
            while warm < _WARM:
                warm += run()
            self._seconds[key].append(run())
        for slot in range(self._loop.target.batch_size):
            self._loop.release(slot)

    def by(self, pick: Callable[[list[float]], float]) -> dict[tuple[str, int], float]:
        """Return the seconds of each step, as `pick` (min, median, …) chooses them from all turns."""
        return {key: pick(seconds) for key, seconds in self._seconds.items()}


def timed_step(executor: Executor, nodes: int, rows: int) -> Callable[[], float]:
    """Return a function that runs a step of all slots and returns its seconds.

    Each slot has a chain of `nodes` after `rows` cached rows of arbitrary content. On a device only the step itself is
    timed, without the copies from and to the host. Slots must be free, and the caller must release them afterwards.

    Args:
        executor: The model's executor.
        nodes: Nodes of each slot.
        rows: Cached rows of each slot.

    Raises:
        ExecutionError: The rows do not fit in the cache.
    """
    positions = range(rows, rows + nodes)
    hidden = np.zeros((nodes, executor.spec.hidden), np.float32) if executor.spec.reads_hidden else None
    slots = range(executor.batch_size)
    inputs = [StepInput(slot, rows, rows, [0] * nodes, positions, None, nodes, hidden) for slot in slots]
    executor.step(inputs)
    if isinstance(executor, StandardExecutor):
        return _timed_graph(executor, inputs)

    def run() -> float:
        before = executor.seconds
        executor.step(inputs)
        return executor.seconds - before

    return run


def _timed_graph(executor: StandardExecutor, inputs: Sequence[StepInput]) -> Callable[[], float]:
    """See `timed_step`. The executor's own step, which is not timed, copies the inputs to the device."""
    step = executor.repeatable(executor.bucket(len(inputs[0].tokens)))

    def run() -> float:
        executor.step(inputs)
        before = executor.seconds
        executor.timed(step)
        executor.wait()
        return executor.seconds - before

    return run
