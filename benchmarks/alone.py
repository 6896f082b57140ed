"""The models' steps by themselves, and what a round takes beside them: part of benchmarks/engines.py."""

from __future__ import annotations

import statistics
import time
from typing import Any

from specbuild.runtime import TreeSpec
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.decoding.device.loop import DeviceLoop

STEPS, TURNS = 20, 9  # of a model's step alone


def executors(loop: DeviceLoop) -> list[StandardExecutor]:
    """The target's, and the draft's where a model of the bundle drafts."""
    return [loop.target, *([loop.draft_executor] if loop.draft_executor else [])]


def steps(loop: DeviceLoop, trees: list[str], found: dict[str, Any]) -> None:
    """What the models' steps take alone, and what is left of a round of each tree beside them."""
    alone, rows = Alone(loop), found["ways"]
    for tree in trees:
        row, models = rows[tree], alone.round_ms(tree)
        row |= {"models_ms": round(models, 4), "glue_and_host_share": round(1 - models / row["round_ms"], 4)}
        row["graph_speedup"] = round(rows[f"{tree}, enqueue"]["round_ms"] / row["round_ms"], 3)
    found["steps_ms"] = alone.all()


class Alone:
    """The models' steps by themselves, each a graph replayed many times, in a loop that has nothing to do."""

    def __init__(self, loop: DeviceLoop) -> None:
        self._target, self._draft = loop.target, loop.draft_executor
        self._all = executors(loop)
        self._known: dict[tuple[str, int], float] = {}

    def round_ms(self, tree: str) -> float:
        """The steps of a round that drafts a tree, or "off"."""
        if tree == "off" or self._draft is None:
            return self.step_ms(self._target, 1)
        spec, draft = TreeSpec.parse(tree), self._draft
        levels = (spec.depth - 1) * self.step_ms(draft, draft.bucket(spec.expand))
        return self.step_ms(self._target, self._target.bucket(1 + spec.nodes)) + self.step_ms(draft, 2) + levels

    def all(self) -> dict[str, float]:
        """Every bucket of both models."""
        for executor in self._all:
            for nodes in executor.model.buckets:
                self.step_ms(executor, nodes)
        return {f"{name} {nodes}": round(ms, 4) for (name, nodes), ms in sorted(self._known.items())}

    def step_ms(self, executor: StandardExecutor, nodes: int) -> float:
        """The median time of one step."""
        key = executor.spec.name, nodes
        if key not in self._known:
            step, times = executor.repeatable(nodes), []
            for _ in range(TURNS + 2):
                started = time.perf_counter()
                for _ in range(STEPS):
                    step()
                executor.wait()
                times.append((time.perf_counter() - started) * 1e3 / STEPS)
            self._known[key] = statistics.median(times[2:])
        return self._known[key]
