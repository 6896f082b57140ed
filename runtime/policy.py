"""Never slower than plain decoding: what each round drafts, by the tokens a second that it promises.

A round that emits e tokens in t seconds is worth e − λ·t, where λ is the tokens a second that the sequence gets by now.
Whatever is worth most raises the rate in the long run (Dinkelbach's method for ratios, 1967), and so a level of the
draft, or a node to verify, is worth its while where the tokens that it adds are more than λ times its seconds: the
stop rule of CaDDTree (arXiv 2606.01813). Seconds are the cost table's, never a clock's. No token depends on any of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .costs import Chances, Costs, Times

PRIOR, CAUTION = 2.0, 0.7  # expected tokens that what was known before weighs, and how far nothing known is believed
LOOKUP_PRIOR = 4.0
SURPRISE = 4.0  # tokens expected since the last that came true: by chance it is one time in e⁴ that none did
MEMORY, SESSION_MEMORY, RATE_MEMORY = 0.8, 0.98, 0.9  # what is left of a round a round later
PROBES = (8, 64)  # rounds that a draft rests which does not pay: the first time, and at most
HOPE = 1.25  # by how much better than calibrated a draft might do: one that would not pay even so is never tried
LONGEST = 16  # tokens of the text's continuation at most
Kind = Literal["plain", "lookup", "model"]


@dataclass(slots=True)
class Trust:
    """How many drafted tokens came true for each that was expected to; what was long ago counts less."""

    accepted: float = PRIOR * CAUTION
    expected: float = PRIOR
    memory: float = MEMORY
    missed: float = 0.0  # expected since the last that came true

    @property
    def ratio(self) -> float:
        """The estimate: the mean of a gamma distribution."""
        return self.accepted / self.expected

    @property
    def deviation(self) -> float:
        """The estimate's standard deviation, by the same distribution."""
        return math.sqrt(self.accepted) / self.expected

    def record(self, accepted: float, expected: float) -> None:
        """What came of a round; what was before a sudden end of all success counts no more."""
        self.accepted = self.memory * self.accepted + accepted
        self.expected = self.memory * self.expected + expected
        self.missed = 0.0 if accepted else self.missed + expected
        if self.missed * self.ratio > SURPRISE:
            self.accepted, self.expected = 0.0, self.missed


@dataclass(frozen=True, slots=True)
class Option:
    """What a round might do: tokens it should emit, and seconds. `nodes`: drafted; of the model's tree, a guess."""

    kind: Kind
    nodes: int
    tokens: float
    seconds: float
    probe: bool = False

    def worth(self, rate: float) -> float:
        """In tokens."""
        return self.tokens - rate * self.seconds


@dataclass(slots=True)
class Outlook:
    """One sequence's policy: how its drafts have fared, and what its next round does."""

    costs: Costs
    chances: Chances
    drafts: bool  # whether there is a model to draft with
    session: Trust  # of the model, in all sequences so far
    model: Trust = field(init=False)
    lookup: Trust = field(default_factory=lambda: Trust(LOOKUP_PRIOR, LOOKUP_PRIOR))  # it costs little to be believed
    now: Option = Option("plain", 0, 1.0, 0.0)
    _times: Times = field(init=False)
    _tokens: float = 0.0  # emitted, and the seconds they took, both forgotten slowly
    _seconds: float = 0.0
    _rest: int = 0  # rounds until the model is asked again
    _wait: int = PROBES[0]
    _spent: float = 0.0  # seconds of this round's draft
    _expected: float = 0.0  # accepted tokens of this round's tree, by calibration alone

    def __post_init__(self) -> None:
        self.model = Trust(PRIOR * self.session.ratio)

    def choose(self, batch: int, matched: int, room: int) -> Option:
        """What the next round does beside `batch − 1` others; `matched` tokens repeat, `room` may be drafted."""
        self._times, self._spent, self._expected = self.costs.at(batch), 0.0, 0.0
        room = min(room, len(self._times.verify) - 2)
        options = [self._plain()]
        if matched and room > 0:
            options.append(self._repeat(matched, room))
        if self.drafts and room > 0:
            options += self._ask(room)
        rate = self.rate
        self.now = max(options, key=lambda option: -math.inf if option.probe else option.worth(rate))
        if self.now.kind == "plain" and options[-1].probe:
            self.now = options[-1]
        if self.now.kind == "lookup":
            self._expected = sum(self._continues(matched, self.now.nodes))
        if self.now.kind == "model":
            self._spent = float(self._times.draft[1]) + self._times.level
        return self.now

    @property
    def rate(self) -> float:
        """λ: tokens a second, at least those of plain decoding; at first what the model's trees should bring."""
        if not self._seconds:
            best = (
                max(self._trees(self.model.ratio, LONGEST), key=lambda o: o.tokens / o.seconds) if self.drafts else None
            )
            self._tokens, self._seconds = (best.tokens, best.seconds) if best else (1.0, self._times.alone)
        return max(self._tokens / self._seconds, 1 / self._times.alone)

    def _plain(self) -> Option:
        return Option("plain", 0, 1.0, self._times.alone)

    def _continues(self, matched: int, count: int) -> list[float]:
        """By calibration, that each of `count` tokens of a continuation comes true: the match grows with each."""
        known, reached, chances = self.chances.lookup, 1.0, list[float]()
        for more in range(count):
            reached *= known[min(matched + more, len(known) - 1)]
            chances.append(reached)
        return chances

    def _repeat(self, matched: int, room: int) -> Option:
        """The text's continuation, as long as it is worth most."""
        options, tokens = list[Option](), 1.0
        for count, chance in enumerate(self._continues(matched, min(room, LONGEST)), 1):
            tokens += min(self.lookup.ratio * chance, 1.0)
            options.append(Option("lookup", count, tokens, float(self._times.verify[count + 1]) + self._times.round))
        return max(options, key=lambda option: option.worth(self.rate))

    def _ask(self, room: int) -> list[Option]:
        """The model's tree where it pays, by what such trees bring; where it does not, a node of it, now and then."""
        if self._rest:
            self._rest -= 1
            return []
        rate, plain = self.rate, self._plain()
        best = max(self._trees(self.model.ratio, room), key=lambda option: option.worth(rate))
        if best.worth(rate) > plain.worth(rate):
            return [best]
        if max(option.worth(1 / plain.seconds) for option in self._trees(HOPE, room)) <= 0:
            return []
        times = self._times
        seconds = float(times.draft[1] + times.verify[2]) + times.level + times.round
        return [Option("model", 1, 1 + self.model.ratio * self.chances.step, seconds, probe=True)]

    def _trees(self, ratio: float, room: int) -> list[Option]:
        """The model's trees by their levels, where `ratio` of the calibration's accepted tokens are."""
        times, options = self._times, list[Option]()
        for levels in range(1, min(len(self.chances.reach) - 1, room) + 1):
            nodes = min(2 * levels, room)
            seconds = levels * (float(times.draft[1]) + times.level) + float(times.verify[nodes + 1]) + times.round
            options.append(Option("model", nodes, 1 + ratio * self.chances.reach[levels], seconds))
        return options

    def expands(self, scores: Sequence[float]) -> int:
        """How many nodes, best first by the logarithms of their chances, are worth another level of the draft."""
        if self.now.probe:
            return 0
        draft, step, gain, best, count = self._times.draft, self.model.ratio * self.chances.step, 0.0, 0.0, 0
        for size, score in enumerate(scores[: len(draft) - 1], 1):
            gain += step * math.exp(score)
            worth = gain - self.rate * (float(draft[size]) + self._times.level)
            if worth > best:
                best, count = worth, size
        if count:
            self._spent += float(draft[count]) + self._times.level
        return count

    def verifies(self, scores: NDArray[np.float64]) -> int:
        """How many nodes, best first by the logarithms of their chances, are worth verifying."""
        expected = np.concatenate([[0.0], np.cumsum(np.exp(scores))])
        worth = self.model.ratio * expected - self.rate * self._times.verify[1 : len(expected) + 1]
        count = min(len(scores), 1) if self.now.probe else int(worth.argmax())
        self._expected = float(expected[count])
        return count

    def record(self, accepted: int, nodes: int) -> None:
        """What came of the round: of `nodes` that were verified beside the root `accepted` came true."""
        if self.now.kind == "lookup":
            self.lookup.record(accepted, self._expected)
        elif self.now.kind == "model":
            self.model.record(accepted, self._expected)
            self.session.record(accepted, self._expected)
            if accepted and self.model.ratio < 1:
                self._wait = max(self._wait // 2, PROBES[0])
            elif self.now.probe:
                self._rest, self._wait = self._wait, min(2 * self._wait, PROBES[1])
        times = self._times
        seconds = float(times.verify[nodes + 1]) + (times.round if nodes else times.plain) + self._spent
        self._tokens = RATE_MEMORY * self._tokens + 1 + accepted
        self._seconds = RATE_MEMORY * self._seconds + seconds


class Policy:
    """An engine's: every request that leaves speculation to it gets an `Outlook`."""

    def __init__(self, costs: Costs, drafts: bool) -> None:
        """`drafts`: whether there is a model to draft with."""
        self.costs, self.drafts = costs, drafts
        self._sessions = {sampled: Trust(memory=SESSION_MEMORY) for sampled in (False, True)}

    def outlook(self, temperature: float) -> Outlook:
        """A sequence's own, that begins with what was seen of the model in others."""
        return Outlook(self.costs, self.costs.chances(temperature), self.drafts, self._sessions[temperature > 0])
