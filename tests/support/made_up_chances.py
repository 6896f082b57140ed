"""A made-up timing table, and a loop of hash models whose steps take what such a table says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from hash_models import HashExecutor, sequence_of

from specbuild.runtime import Limits, SamplingParams
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.decoding.loop import LoopOptions
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.controller import Controller
from specbuild.runtime.speculation.cost_model import CostModel
from specbuild.runtime.speculation.timing_table import TimingTable

CHANCES = {
    "likely": [-8.0, -2.0, -1.0, -0.5, -0.1, 0.0],
    "chance": [0.01, 0.1, 0.35, 0.6, 0.85, 0.95],
    "step": 0.75,
    "reach": [0, 0.75, 1.3, 1.7, 2.0, 2.2, 2.35, 2.45, 2.5],
    "lookup": [0.0, 0.3, 0.5, 0.6, 0.7, 0.75],
}
# Steps of a large model, of which rows are cheap; and of a small one, of which they are dear.
LARGE = {"verify": [[1, 12.0], [64, 48.0]], "draft": [[1, 0.6], [64, 4.0]], "plain": 0.1, "round": 0.2, "level": 0.1}
SMALL = {"verify": [[1, 0.8], [64, 5.0]], "draft": [[1, 0.2], [64, 0.6]], "plain": 0.05, "round": 0.1, "level": 0.05}


def record_of(times, slots=1, chances=CHANCES):
    """The JSON of a table with the same times for one sequence and for as many as there are slots."""
    both = {"greedy": chances, "sampled": chances}
    return {"schema": 2, "machine": {}, "widest": "best:15", "times": {"1": times, str(slots): times}, "chances": both}


def table_of(times, slots=1, chances=CHANCES, most=64):
    return TimingTable.of(record_of(times, slots, chances), most)


class Round(NamedTuple):
    """What all sequences of a round drafted and emitted, and its seconds by the table."""

    drafted: int
    emitted: int
    seconds: float


class PricedExecutor(HashExecutor):
    """An executor whose steps take `price` seconds by their rows; `slowed`: how many times as long, by the rows."""

    price: Any = None
    slowed: Callable[[int], float] = staticmethod(lambda rows: 1.0)

    def step(self, inputs):
        before, rows = self.seconds, sum(len(each.tokens) for each in inputs)
        logits = super().step(inputs)
        self.seconds = before + float(self.price[min(rows, len(self.price) - 1)]) * self.slowed(rows)
        return logits


class PricedLoop:
    """A loop on the host with a controller; `run` decodes requests and notes their rounds."""

    def __init__(self, target, draft, times, slots=1, limits=None, live=False, looks_up=False):
        """`live`: whether rounds correct the table."""
        self.table, self.slots = table_of(times, slots), slots
        self.times = self.table.at(slots)
        self.target = PricedExecutor(target, slots, 600, 64)
        self.target.price = self.times.verify
        self.draft = PricedExecutor(draft, slots, 600, 64) if draft else None
        if self.draft:
            self.draft.price = self.times.draft + self.times.level
        cost = CostModel(self.table, slots, corrected=live)
        model = ModelDrafter(self.draft, 64) if self.draft else None
        options = LoopOptions(limits or Limits(), cost=cost if live else None)
        self.loop = HostLoop(self.target, Proposer(model, looks_up), 64, frozenset(), options)
        self.controller = Controller(cost, draft is not None)
        self.rounds = list[Round]()

    @property
    def seconds(self):
        """Seconds of the rounds since the prompts were read."""
        return sum(each.seconds for each in self.rounds)

    def plain(self, sequences=1):
        """Seconds of a round of plain decoding."""
        return CostModel(self.table, self.slots).of_round(sequences).plain

    def drafted(self):
        return [each.drafted for each in self.rounds]

    def run(self, *prompts, count, before=None, **params):
        """Decode texts side by side; `before(tokens)` is called before each round; a list gives each its parameter."""
        found = list[Sequence]()
        for slot, prompt in enumerate(prompts):
            own = {name: each[slot] if isinstance(each, list) else each for name, each in params.items()}
            asked = SamplingParams(**{"max_new_tokens": count, "speculation": "best:16"} | own)
            found.append(sequence_of(prompt, asked, slot=slot))
            if asked.speculation == "best:16":
                found[-1].controller = self.controller.for_request(asked.temperature, asked.session)
        self.loop.round(found)
        self.rounds = []
        while active := [each for each in found if not each.finish_reason]:
            if before:
                before(len(active[0].output))
            self._round(active)
        for slot in range(len(prompts)):
            self.loop.release(slot)
        return found

    def _round(self, active):
        def totals():
            told = [each.metrics.speculative_decoding.num_draft_tokens for each in active]
            models = self.target.seconds + (self.draft.seconds if self.draft else 0.0)
            return np.array([sum(told), sum(len(each.output) for each in active), models])

        before = totals()
        self.loop.round(active)
        drafted, emitted, seconds = (totals() - before).tolist()
        own = (self.times.round if drafted else self.times.plain) * len(active) / self.slots
        self.rounds.append(Round(int(drafted), int(emitted), seconds + own))
