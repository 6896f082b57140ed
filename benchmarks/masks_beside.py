"""Test whether computing masks beside the model pays: rounds with and without a thread for the nodes' masks.

python benchmarks/masks_beside.py smollm2.bundle [--threads N] [--turns N] [--out benchmarks/out]

Each round of each text runs both ways in turns. The thread computes the masks of all drafted nodes while the target's
step runs (both release Python's lock), and the walk then finds them cached. Without the thread, the walk computes the
masks of the nodes that it reaches.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, machine, parser
from structured import FORM

from specbuild import Engine, SamplingParams, StructuredOutputs
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.sampling.grammar import GrammarMatcher

Key = tuple[str, int, int]  # speculation, text, round


@dataclass
class Rounds:
    """The times of rounds, by round and by whether the thread was used; it replaces the loop's methods to take them."""

    loop: Any
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    took: dict[tuple[Key, bool], list[float]] = field(default_factory=lambda: defaultdict(list))
    masks: dict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))  # time on the loop's own thread
    key: Key = ("", 0, 0)
    turn: int = 0
    spent: float = 0.0
    drafted: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        loop, mask = self.loop, GrammarMatcher.mask
        whole, draft, step = loop.round, loop.draft, loop.target.step

        def timed(matcher: GrammarMatcher, path: Sequence[int]) -> Any:
            began = time.perf_counter()
            try:
                return mask(matcher, path)
            finally:
                self.spent += time.perf_counter() - began

        def ahead(drafted: list[Any]) -> None:
            for matcher, tree in drafted:
                for node in range(len(tree)):
                    try:
                        mask(matcher, tree.path(node))
                    except ExecutionError:
                        continue  # the walk cannot reach this node

        def drafts(sequences: Any) -> Any:
            trees = draft(sequences)
            both = zip(sequences, trees, strict=True)
            self.drafted = [(s.sampler.matcher, tree) for s, tree in both if s.decodes and s.sampler.matcher]
            return trees

        def steps(inputs: Any) -> Any:
            waited: Future[None] | None = self.thread.submit(ahead, self.drafted) if self.beside else None
            try:
                return step(inputs)
            finally:
                if waited:
                    waited.result()

        def rounds(sequences: Any) -> None:
            self.spent, began = 0.0, time.perf_counter()
            whole(sequences)
            self.took[self.key, self.beside].append(1e3 * (time.perf_counter() - began))
            if not self.beside:
                self.masks[self.key].append(1e3 * self.spent)
            self.key = (*self.key[:2], self.key[2] + 1)

        GrammarMatcher.mask = timed  # type: ignore[method-assign,assignment]
        loop.round, loop.draft, loop.target.step = rounds, drafts, steps

    @property
    def beside(self) -> bool:
        """Whether the current round uses the thread."""
        return (self.turn + self.key[2]) % 2 == 1

    def told(self, speculation: str) -> dict[str, Any]:
        """Return milliseconds of a round: means over rounds of their quickest and median times, and the masks' part."""
        keys = [k for k in self.masks if k[0] == speculation and k[2] and self.took.get((k, True))]
        found: dict[str, Any] = {"rounds": len(keys)}
        for name, beside in (("walk", False), ("thread", True)):
            for way in (min, statistics.median):
                value = statistics.mean(way(self.took[key, beside]) for key in keys)
                found[f"{name}_{'quickest' if way is min else 'median'}"] = round(value, 3)
        return found | {"masks_quickest": round(statistics.mean(min(self.masks[key]) for key in keys), 4)}


def main() -> None:
    """Measure and write masks-beside-cpu.json."""
    options_of = parser((__doc__ or "").splitlines()[0])
    options_of.add_argument("bundle", type=Path)
    options_of.add_argument("--turns", type=int, default=8)
    options_of.add_argument("--threads", type=int, help="of the model; by default the machine's cores")
    options = options_of.parse_args()
    lines = (ROOT / "tests" / "data" / "structured.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [{"name": "form", "json": FORM}, *map(json.loads, lines[::31])]
    told: dict[str, Any] = {"bundle": options.bundle.name, "threads": options.threads, "machine": machine()}
    with Engine.load(options.bundle, threads=options.threads) as engine:
        rounds = Rounds(engine._loop)
        told["vocabulary"] = engine.manifest.models["target"].vocab_size
        for rounds.turn in range(options.turns):
            for speculation in ("chain:7", "off"):
                for number, row in enumerate(rows):
                    rounds.key = speculation, number, 0
                    fields = {name: value for name, value in row.items() if name != "name"}
                    params = SamplingParams(64, speculation=speculation, structured_outputs=StructuredOutputs(**fields))
                    engine.generate(f"# {row['name']}\n", params)
        told |= {speculation: rounds.told(speculation) for speculation in ("chain:7", "off")}
        rounds.thread.shutdown()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "masks-beside-cpu.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in told.items() if name != "machine"}, indent=2))


if __name__ == "__main__":
    main()
