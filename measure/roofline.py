"""What a step of a model must move and compute, against what the device can: its roofline.

A step reads its weights once and the cached keys and values that its nodes see, writes their own rows and their logits,
and multiplies. Rows of lookup tables and what a kernel keeps for itself are not counted. Of a mixture of experts a step
reads as many as its nodes can choose.
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

_TIMES = 10  # of each measurement of the device; the best counts
_WARM = 3e-3  # seconds of a step's repetition before it is timed
_LONG = 0.05  # seconds of a step that warms itself
_NODE_BYTES, _LOGIT_BYTES = 8, 4  # token and position; float32
Bound = Literal["memory", "compute", "unknown"]


@dataclass(frozen=True, slots=True)
class Attention:
    """Layers of one shape: positions that a node sees (0: all), query heads, and how many such layers there are."""

    window: int
    heads: int
    layers: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Products by `chosen` of `count` experts: one expert's parameters and bytes, and how many such products."""

    count: int
    chosen: int
    parameters: int
    bytes: int
    products: int


@dataclass(frozen=True, slots=True)
class Products:
    """A graph's products. `parameters`: multiply-adds of a node; `bytes`: what every step reads; experts apart."""

    parameters: int
    bytes: int
    head_dim: int
    attention: tuple[Attention, ...]
    experts: tuple[Experts, ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Products:
        """As report.json has them."""
        attention = tuple(Attention(**each) for each in fields["attention"])
        experts = tuple(Experts(**each) for each in fields["experts"])
        return cls(fields["parameters"], fields["bytes"], fields["head_dim"], attention, experts)

    def step(
        self, record: ModelRecord, batch: int, nodes: int, rows: int, cache_bytes: int | None = None
    ) -> tuple[int, int]:
        """Bytes and FLOPs of a step: chains of `nodes` after `rows` committed rows, `batch` of them, all logits.

        cache_bytes: of a number in the caches, None for the model's own type.
        """
        new = batch * nodes
        row = 2 * record.kv_heads * record.head_dim * (cache_bytes or item_bytes(record.precision))
        moved = self.bytes + new * (record.vocab_size * _LOGIT_BYTES + _NODE_BYTES)
        products = new * self.parameters
        for experts in self.experts:
            moved += experts.products * experts.bytes * min(experts.count, experts.chosen * new)
            products += experts.products * experts.parameters * experts.chosen * new
        for each in self.attention:
            window = each.window or math.inf
            moved += int(batch * each.layers * row * (min(rows, window - 1) + nodes))
            seen = sum(min(rows + node + 1, window) for node in range(nodes))
            products += int(batch * each.layers * each.heads * 2 * self.head_dim * seen)
        return moved, 2 * products


@dataclass(frozen=True, slots=True)
class Roofline:
    """A measured step beside the device's bandwidth (bytes/s) and peak (FLOP/s; None: not known)."""

    bytes: int
    flops: int
    seconds: float
    bandwidth: float
    peak_flops: float | None

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    @property
    def bound(self) -> Bound:
        """Which takes longer at least, moving or computing."""
        if self.peak_flops is None:
            return "unknown"
        return "memory" if self.bytes / self.bandwidth >= self.flops / self.peak_flops else "compute"

    @property
    def least_seconds(self) -> float:
        """What the device needs at least; without a known peak, to move the bytes."""
        return max(self.bytes / self.bandwidth, self.flops / self.peak_flops if self.peak_flops else 0.0)

    @property
    def share(self) -> float:
        """The least time over the measured one; over 1 where weights come from a cache."""
        return self.least_seconds / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything, times in seconds."""
        rates = {f"{name}_per_second": getattr(self, name) / self.seconds for name in ("bytes", "flops")}
        names = "bytes", "flops", "seconds", "least_seconds", "share", "bound"
        return {name: getattr(self, name) for name in names} | {"flops_per_byte": self.intensity} | rates


def measure_device(executor: Executor, precision: str) -> tuple[float, float | None]:
    """Bandwidth in bytes/s and peak in FLOP/s of where a model runs.

    A GPU's is that of copies, and its peak is not known. A CPU's, all cores at work, is that of copies or of reading
    alone, whichever is more, and its peak that of a float32 product, None for another `precision`.
    """
    if isinstance(executor, StandardExecutor) and isinstance(executor.device, Cuda):
        return executor.device.measure_bandwidth(), None
    return cpu_bandwidth(), cpu_peak() if precision == "fp32" else None


def cpu_bandwidth(size: int = 1 << 26) -> float:
    """Bytes a second, read and written; every core has two arrays of `size` bytes, which no cache should hold."""
    count = cores()
    pairs = [np.ones((2, size // 4), dtype=np.float32) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        copied = _best(lambda: list(pool.map(lambda pair: np.copyto(pair[0], pair[1]), pairs)))
        read = _best(lambda: list(pool.map(lambda pair: pair.max(), pairs)))
    return sum(pair.nbytes for pair in pairs) / min(copied, read)


def cpu_peak(size: int = 1024) -> float:
    """FLOPs a second of NumPy's product of two float32 matrices of this size."""
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
    """Steps by "target" or "draft" and nodes, of all slots after `rows` rows, and what each takes.

    In a turn all are timed, so whatever else the machine does meets them all, and each after others of its own size, as
    in the rounds of a text. Slots must be free.
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
        """Seconds of each, picked from all turns'."""
        return {key: pick(seconds) for key, seconds in self._seconds.items()}


def timed_step(executor: Executor, nodes: int, rows: int) -> Callable[[], float]:
    """A step of all slots, each a chain of `nodes` after `rows` rows of whatever the cache has; its seconds, each time.

    On a device it is the step itself, without the copies from and to the host. Slots must be free, and be released
    afterwards. Raises ExecutionError where the rows do not fit.
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
    """See `timed_step`; the executor's own step brings the inputs, and is not timed."""
    step = executor.repeatable(executor.bucket(len(inputs[0].tokens)))

    def run() -> float:
        executor.step(inputs)
        started = time.perf_counter()
        step()
        executor.wait()
        return time.perf_counter() - started

    return run
