"""Policies on recorded texts, against a timing table in seconds: what a constant is worth, without a model.

At every position of a plain text it is recorded what each drafter would bring there. A policy is then run over such
records as over rounds: what it decides costs what the table says, times what a machine makes of that, and brings what
came true. So batches and loads are compared on the same texts, in a second, and no other process disturbs them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.drafting.lookup import continuation, matches
from specbuild.runtime.speculation.batch import Batch, Wish
from specbuild.runtime.speculation.live import LiveTimings
from specbuild.runtime.speculation.policy import LONGEST, Policy, SequencePolicy
from specbuild.runtime.speculation.timings import TimingTable
from specbuild.runtime.speculation.tree import TreeSpec

WIDEST = TreeSpec.parse("best:64")
Machine = Callable[[str, int, float, int], float]  # the part, its rows, the table's seconds, the round → seconds


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a text: tokens that repeat there, how many of their continuation come true, of the model's too."""

    matched: int
    text: int
    model: int = 0


def positions(tokens: NDArray[np.int64], prompt: int, model: Sequence[int] = ()) -> list[Position]:
    """Of a text whose first `prompt` tokens were given. `model`: by position, levels of its tree that come true."""
    found = list[Position]()
    for at in range(prompt, len(tokens)):
        start, matched = next(iter(matches(tokens[:at], 1)), (0, 0))
        drafted = continuation(tokens[:at], start, min(LONGEST, len(tokens) - at)) if matched else []
        wrong = [drafted[i] != tokens[at + i] for i in range(len(drafted))]
        true = wrong.index(True) if True in wrong else len(wrong)
        found.append(Position(matched, true, model[at - prompt] if at - prompt < len(model) else 0))
    return found


def quiet(part: str, rows: int, seconds: float, number: int) -> float:
    """A machine as the table has it."""
    return seconds


def busy(rows_cost: float = 1.0, since: int = 0, noise: float = 0.0, seed: int = 0) -> Machine:
    """A machine where from some round on each row of the target's steps costs more, by so many of a step's seconds.

    noise: of all seconds, the deviation of their logarithms.
    """
    drawn = random.Random(seed)

    def machine(part: str, rows: int, seconds: float, number: int) -> float:
        slow = 1 + rows_cost * (number >= since) * (rows if part == "verify" else 0.2)
        return seconds * slow * drawn.lognormvariate(0, noise)

    return machine


@dataclass(slots=True)
class Outcome:
    """What a run came to; `plain`: seconds of plain decoding for as many tokens of each sequence."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    plain: float = 0.0
    decisions: Counter[str] = field(default_factory=Counter)

    @property
    def speedup(self) -> float:
        """Over plain decoding on the same machine."""
        return self.plain / self.seconds


@dataclass(slots=True)
class _Running:
    """A sequence of a simulated batch."""

    policy: SequencePolicy
    text: Sequence[Position]
    at: int = 0


class Simulator:
    """Runs texts through one engine's policy, so many at once; a text that ends is followed by the next."""

    def __init__(
        self, table: TimingTable, lanes: int, machine: Machine = quiet, live: bool = True, free: int = 0
    ) -> None:
        self._table, self._lanes, self._machine = table, lanes, machine
        self._live, self._free = LiveTimings(table, lanes, live), free
        self._least = self._filled(lanes)  # rows of plain decoding

    def run(self, texts: Sequence[Sequence[Position]], drafts: bool, temperature: float, rounds: int) -> Outcome:
        """So many rounds over the texts, again and again. `drafts`: whether there is a model."""
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
            Batch(wishes).decide()
            emitted = self._round(running, places, done, number, temperature)
            done.plain += emitted / self._lanes * self._plain(self._least, number, temperature)
            for index, each in enumerate(running):
                if each.at >= len(each.text):
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
            came, most = (place.model, policy.now.levels) if now.levels else (place.text, now.nodes)
            accepted = min(came, most)
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
        """What a round took, by the machine; the live timings are told of it as a loop would."""
        table, rows, least = self._table.at(self._lanes, temperature), min(rows, 64 * self._lanes), self._least
        verify = self._machine("verify", rows, float(table.verify_rows[rows]), number)
        draft = [
            self._machine("draft", self._lanes, float(table.draft_rows[self._lanes]), number) for _ in range(levels)
        ]
        for took in draft:
            self._live.step("draft", self._lanes, took)
        self._live.step("verify", rows, verify)
        own = self._machine("own", 1, (table.round if rows > least else table.plain) + levels * table.level, number)
        self._live.round(own, self._lanes, rows - least, temperature > 0, self._lanes)
        done.seconds += verify + sum(draft) + own
        done.rounds += 1
