"""A simulator of speculation policies on recorded texts and a timing table, to evaluate a constant without a model.

For every position of a plainly decoded text, a record says how many tokens each drafter would get accepted there. A
policy then runs over the records as over rounds. Its decisions cost the table's seconds, modified by a simulated
machine, and yield the recorded tokens. So batches and loads are compared on the same texts, within a second and
undisturbed by other processes.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import numpy as np

from specbuild.runtime.drafting.lookup import continuation, longest
from specbuild.runtime.requests.sequence import string_of
from specbuild.runtime.speculation.batch import Batch, Wish
from specbuild.runtime.speculation.lead import LEEWAY, gain
from specbuild.runtime.speculation.live import LiveTimings
from specbuild.runtime.speculation.policy import LONGEST, Policy, SequencePolicy
from specbuild.runtime.speculation.timings import TimingTable
from specbuild.runtime.speculation.tree import TreeSpec

WIDEST = TreeSpec.parse("best:64")
Machine = Callable[[str, int, float, int], float]  # part, rows, the table's seconds, number of the round → seconds


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a recorded text.

    `matched`: tokens before it that repeat earlier text; `text`: tokens of the continuation there that come true;
    `model`: levels of the draft model's tree that come true.
    """

    matched: int
    text: int
    model: int = 0


def positions(tokens: Sequence[int], prompt: int, model: Sequence[int] = ()) -> list[Position]:
    """Return the record of each position after a text's prompt.

    Args:
        tokens: The text's token ids, prompt included.
        prompt: The number of prompt tokens.
        model: Levels of the draft model's tree that come true at each position; 0 for missing ones.
    """
    found, text = list[Position](), string_of(tokens)
    for at in range(prompt, len(tokens)):
        start, matched = longest(text[:at])
        drafted = continuation(tokens[:at], start, min(LONGEST, len(tokens) - at)) if matched else []
        wrong = [drafted[i] != tokens[at + i] for i in range(len(drafted))]
        true = wrong.index(True) if True in wrong else len(wrong)
        found.append(Position(matched, true, model[at - prompt] if at - prompt < len(model) else 0))
    return found


def quiet(part: str, rows: int, seconds: float, number: int) -> float:
    """Return the table's seconds unchanged: a machine as quiet as the measured one."""
    return seconds


def busy(rows_cost: float = 1.0, since: int = 0, noise: float = 0.0, seed: int = 0) -> Machine:
    """Return a machine that is loaded from some round on, where steps slow down with their rows.

    Args:
        rows_cost: What each row of a target step adds, in multiples of the step's seconds; other parts take
            0.2 × `rows_cost` of their seconds more.
        since: The first round with the load.
        noise: Standard deviation of the logarithm of all seconds.
        seed: Seed of the noise.
    """
    drawn = random.Random(seed)

    def machine(part: str, rows: int, seconds: float, number: int) -> float:
        slow = 1 + rows_cost * (number >= since) * (rows if part == "verify" else 0.2)
        return seconds * slow * drawn.lognormvariate(0, noise)

    return machine


@dataclass(slots=True)
class Outcome:
    """The result of a simulated run.

    `plain`: seconds that plain decoding would take for as many tokens; `slowdowns`: each text's seconds over those.
    """

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    plain: float = 0.0
    slowdowns: list[float] = field(default_factory=list)
    decisions: Counter[str] = field(default_factory=Counter)

    @property
    def speedup(self) -> float:
        """Speedup over plain decoding on the same machine."""
        return self.plain / self.seconds

    @property
    def slowest(self) -> float:
        """The p99 of the texts' slowdowns."""
        return float(np.quantile(self.slowdowns, 0.99)) if self.slowdowns else 1.0


@dataclass(slots=True)
class _Running:
    """A running sequence of a simulated batch, at a position in its text.

    `ahead`: tokens ahead of plain decoding; `lead`: what a loop counts as that, `Sequence.lead`.
    """

    policy: SequencePolicy
    text: Sequence[Position]
    at: int = 0
    ahead: float = 0.0
    lead: float = 0.0


class Simulator:
    """A simulated engine that decodes `lanes` texts at once by its policy; the next text follows each that ends."""

    def __init__(
        self, table: TimingTable, lanes: int, machine: Machine = quiet, live: bool = True, free: int = 0
    ) -> None:
        self._table, self._lanes, self._machine = table, lanes, machine
        self._live, self._free = LiveTimings(table, lanes, live), free
        self._least = self._filled(lanes)  # rows of a plain decoding step

    def run(self, texts: Sequence[Sequence[Position]], drafts: bool, temperature: float, rounds: int) -> Outcome:
        """Simulate a number of rounds over the texts, repeated as needed.

        Args:
            texts: The positions of each text.
            drafts: Whether there is a draft model.
            temperature: The temperature of all requests, which selects the table's times and chances.
            rounds: The number of rounds.
        """
        policy = Policy(self._table, drafts, live=self._live, free=self._free)
        waiting, done = cycle(text for text in texts if text), Outcome()
        running = [_Running(policy.for_request(temperature), text) for text in islice(waiting, self._lanes)]
        for number in range(rounds):
            left = [len(each.text) - each.at for each in running]
            places = [each.text[each.at] for each in running]
            wishes = [
                Wish(each.policy, place.matched, room - 1)
                for each, place, room in zip(running, places, left, strict=True)
            ]
            for each in running:
                each.policy.leads = each.lead, math.inf
            Batch(wishes).decide()
            before, began = [each.at for each in running], done.seconds
            emitted = self._round(running, places, done, number, temperature)
            plain = self._plain(self._least, number, temperature)
            done.plain += emitted / self._lanes * plain
            drafted = any(each.policy.now.kind != "plain" for each in running)
            for index, (each, at) in enumerate(zip(running, before, strict=True)):
                each.ahead += each.at - at - (took := (done.seconds - began) / plain)
                each.lead += gain(each.at - at, took) if drafted and self._live.on else LEEWAY
                if each.at >= len(each.text):
                    done.slowdowns.append(1 - each.ahead / each.at)
                    running[index] = _Running(policy.for_request(temperature), next(waiting))
        return done

    def _plain(self, rows: int, number: int, temperature: float) -> float:
        times = self._table.at(self._lanes, temperature)
        own = self._machine("own", 1, times.plain, number)
        return self._machine("verify", rows, float(times.verify_rows[rows]), number) + own

    def _round(
        self, running: Sequence[_Running], places: Sequence[Position], done: Outcome, number: int, temperature: float
    ) -> int:
        rows = levels = emitted = 0
        for each, place in zip(running, places, strict=True):
            policy, now = each.policy, each.policy.now
            if now.levels:
                policy.grown(WIDEST, range(2, 66))
            came, limit = (place.model, policy.now.levels) if now.levels else (place.text, now.nodes)
            accepted = min(came, limit)
            levels = max(levels, policy.now.levels)
            rows += 1 + policy.now.nodes
            policy.guess = 1
            policy.record(range(accepted + 1), 1 if place.text else 0)
            done.decisions[now.kind] += 1
            gained = min(1 + accepted, len(each.text) - each.at)
            each.at += gained
            emitted += gained
        self._clock(self._filled(rows), levels, done, number, temperature)
        done.tokens += emitted
        return emitted

    def _filled(self, rows: int) -> int:
        return rows + -rows % (1 + self._free)

    def _clock(self, rows: int, levels: int, done: Outcome, number: int, temperature: float) -> None:
        """Add what a round took on the machine, and report it to the live timings as a loop would."""
        table, rows, least = self._table.at(self._lanes, temperature), min(rows, 64 * self._lanes), self._least
        verify = self._machine("verify", rows, float(table.verify_rows[rows]), number)
        draft = [self._machine("draft", self._lanes, table.draft_rows.item(self._lanes), number) for _ in range(levels)]
        for took in draft:
            self._live.step("draft", self._lanes, took)
        self._live.step("verify", rows, verify)
        own = self._machine("own", 1, (table.round if rows > least else table.plain) + levels * table.level, number)
        self._live.round(own, self._lanes, rows - least, temperature > 0, self._lanes)
        done.seconds += verify + sum(draft) + own
        done.rounds += 1
