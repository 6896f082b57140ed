"""Times of the models' steps alone, and the rest of a round beside them; part of engines.py."""

from __future__ import annotations

import statistics
import time
from typing import Any

from specbuild.runtime import TreeSpec
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.decoding.device.loop import DeviceLoop

STEPS, TURNS = 20, 9  # steps per turn, and turns whose median counts
SECONDS = 0.2  # of a turn at most, in which long steps are fewer


def executors(loop: DeviceLoop) -> list[StandardExecutor]:
    """Return the target's executor, and the draft's if the bundle has a draft model."""
    return [loop.target, *([loop.draft_executor] if loop.draft_executor else [])]


def steps(loop: DeviceLoop, trees: list[str], found: dict[str, Any]) -> None:
    """Add to the result the times of the models' steps alone, and their share in a round of each tree."""
    alone, rows = Alone(loop), found["ways"]
    for tree in trees:
        row, models = rows[tree], alone.round_ms(tree)
        row |= {"models_ms": models, "glue_and_host_share": 1 - models / row["round_ms"]}
        row["graph_speedup"] = rows[f"{tree}, enqueue"]["round_ms"] / row["round_ms"]
    found["steps_ms"] = alone.all()


def step_ms(executor: StandardExecutor, nodes: int) -> float:
    """Return the median milliseconds of a step on the executor's current inputs."""
    step, times, count = executor.repeatable(nodes), list[float](), 1
    for _ in range(TURNS + 2):
        started = time.perf_counter()
        for _ in range(count):
            step()
        executor.wait()
        seconds = (time.perf_counter() - started) / count
        times.append(seconds * 1e3)
        count = max(1, min(STEPS, int(SECONDS / seconds)))
    return statistics.median(times[2:])


class Alone:
    """The times of the models' steps alone: each is a graph replayed many times while the loop is idle."""

    def __init__(self, loop: DeviceLoop) -> None:
        self._target, self._draft = loop.target, loop.draft_executor
        self._all = executors(loop)
        self._known: dict[tuple[str, int], float] = {}

    def round_ms(self, tree: str) -> float:
        """Return the milliseconds of all model steps in a round that drafts a tree, or of a plain round ("off")."""
        if tree == "off" or self._draft is None:
            return self.step_ms(self._target, self._target.bucket(1))
        spec, draft = TreeSpec.parse(tree), self._draft
        levels = (spec.depth - 1) * self.step_ms(draft, draft.bucket(spec.expand))
        return self.step_ms(self._target, self._target.bucket(1 + spec.nodes)) + self.step_ms(draft, 2) + levels

    def all(self) -> dict[str, float]:
        """Return the milliseconds of a step of every bucket of both models."""
        for executor in self._all:
            for nodes in executor.model.buckets:
                self.step_ms(executor, nodes)
        return {f"{name} {nodes}": ms for (name, nodes), ms in sorted(self._known.items())}

    def step_ms(self, executor: StandardExecutor, nodes: int) -> float:
        """Return the median milliseconds of one step."""
        key = executor.spec.name, nodes
        if key not in self._known:
            self._known[key] = step_ms(executor, nodes)
        return self._known[key]
