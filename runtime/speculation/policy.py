"""The policy, meant never to be slower than plain decoding: a round drafts what promises most tokens a second.

It drafts nothing, the text's continuation as far as that pays, or a tree of the draft model. The best promise, λ, is
what a second is worth in tokens. While the tree grows, another level, or a node to verify, pays if the tokens that it
adds are more than λ times its seconds: the stop rule of CaDDTree (arXiv 2606.01813). Seconds are the timing table's,
corrected by what rounds take (`live.py`). No token depends on any of this.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from .draft_limits import NO_LIMITS, Limits
from .live import LiveTimings
from .option import PLAIN, Option
from .rest import Rest
from .sessions import Session, Sessions, Source
from .timings import Chances, Times, TimingTable, longer
from .tree import TreeSpec
from .trust import SURE, Trust

MARGIN = 1.15  # required promise over plain decoding: tables, chances and this policy's own time are inexact
STEADY = 0.97  # share of the best tree's promise at which a device keeps the last shape
HOPE = 1.25  # how much better than calibrated a draft might do; one that would not pay even so is never tried
UNLIKELY, SHALLOW = 0.05, 2  # chance at which a continuation ends; levels that are weighed in any case
LONGEST = 24  # maximum tokens of the text's continuation
READINGS = 16  # rounds over which a draft pays for reading the text


@dataclass(slots=True)
class SequencePolicy:
    """One sequence's policy: how its session's drafts have fared, and what its next round does."""

    live: LiveTimings
    chances: Chances
    temperature: float
    drafts: bool  # whether there is a model to draft with
    session: Session
    limits: Limits = NO_LIMITS
    free: int = 0  # drafted nodes that cost a step of this sequence alone nothing: it is padded
    owed: int = 0  # tokens of the text that the draft model has not run
    brought: float = 0.0  # tokens that come true in plain decoding, because a device continues texts by itself
    model: Trust = field(init=False)
    rest: Rest = field(init=False)
    extra: float = 0.0  # seconds that the round's draft adds to those of plain decoding
    now: Option = PLAIN
    guess: int = -1  # the first token of the text's continuation; −1: there is none
    recalled: list[int] = field(default_factory=list)  # continuation from habits, if the text does not repeat
    failed: int = 0  # probes of which nothing came true
    below: list[float] = field(default_factory=list)  # by node of the tree: calibrated chance of a child
    _times: Times = field(init=False)
    _rate: float = 0.0  # λ
    continued: list[float] = field(default_factory=list)  # calibrated chance of each token of the continuation
    matched: int = 0  # tokens that match before it
    room: int = 0  # nodes that may be drafted
    left: int = 0  # free nodes that this sequence may use in this round
    together: int = 1  # sequences in the round's step, prefilling ones included
    leads: tuple[float, float] = (math.inf, math.inf)  # tokens ahead of plain decoding: it, and who drafts nothing
    allotted: int | None = None  # nodes of the model's tree that a batch verifies; None: this policy decides
    _others: int = 0  # tokens that other sequences emit in the same seconds
    _levels: tuple[float, list[float]] | None = None  # the last result of `levels`, and its ratio
    _grown: Option = PLAIN  # the last tree that a device grew

    def __post_init__(self) -> None:
        self.model, self.rest = self.session.trusts["model"], self.session.shared.waits.rest()

    def choose(self, batch: int, matched: int, room: int, pending: int = 1) -> Option:
        """Decide the next round of a step's only sequence; `batch`: how many draft; the others are a `Wish`'s."""
        times = self.live.at(batch, self.temperature)
        self.weigh(self.live.share(times, pending, 1) if pending > 1 else times, batch, matched, room)
        self.left = -pending % (1 + self.free)
        plain = Option("plain", 0, 1.0 + self.brought, times.alone)
        best = self._lookup(self._tree(self.model.ratio, self.room, plain))
        least = plain.rate * max(self.limits.min_expected_speedup, MARGIN)
        good, waits = best.rate >= least, self.live.plain_due
        due = self.drafts and not (good or waits) and self.session.probing.due()
        return self.settle(best if good and not waits else plain, plain, least, due and self._seconds(1, 1))

    def weigh(self, times: Times, batch: int, matched: int, room: int, others: int = 0) -> None:
        """Set what a round costs and may draft; `others`: tokens that other sequences emit in those seconds."""
        self._times, self._others, self.allotted = times, others, None
        self.room = self.limits.max_nodes(batch, min(room, len(times.verify) - 2))
        self.matched, count = matched, min(self.room, LONGEST if matched else len(self.recalled))
        self.continued = self.chances.continuation(matched, count) if matched else self.chances.recalled(count)

    def settle(self, best: Option, plain: Option, least: float, probe: float) -> Option:
        """Decide: `best`, a probe, or free nodes. `least`: a draft's tokens a second; `probe`: seconds, 0 for none."""
        self.now, self._rate = best, best.rate
        if probe and self._tree(HOPE, self.room, plain).rate > least:
            self.now = Option("probe", 1, plain.tokens + self.model.ratio * self.chances.step, probe, 1)
        elif probe:
            self.failed += 1
            self.session.probing.probed(0)
        if self.now is plain and self.left and self.continued and self.matched > 1:  # else no better than habit
            tokens = plain.tokens + self.continued[0]
            self.now = Option("lookup", min(self.left, len(self.continued)), tokens, plain.seconds)
        self.below = [*self.continued[: self.now.nodes], 0.0] if self.now.kind in ("lookup", "habit") else [0.0]
        self.extra = self.now.seconds - plain.seconds
        return self.now

    @property
    def source(self) -> Source:
        """The source of the text's continuation."""
        return "habit" if self.recalled else "lookup"

    @property
    def spare(self) -> int:
        """Free nodes of the round's step beside what was decided."""
        return min(self.left, self.room) if self.now.kind == "plain" else 0

    def fill(self) -> None:
        """Note that a free node is drafted: it costs nothing, promises nothing, and nothing is learnt from it."""
        self.now, self.below = Option("habit", 1, self.now.tokens, self.now.seconds), [0.0, 0.0]

    @property
    def promised(self) -> float:
        """The round's promised tokens a second over those of plain decoding."""
        return 1.0 if self.now is PLAIN else self.now.rate * self._times.alone / (1 + self._others)

    def reached(self) -> list[float]:
        """Return each continuation token's chance to come true with all before it, while that is not UNLIKELY."""
        found, reached, ratio = list[float](), 1.0, self.session.trusts[self.source].ratio
        for chance in self.continued:
            reached *= min(chance * ratio, SURE)
            if reached < UNLIKELY:
                break
            found.append(reached)
        return found

    def _lookup(self, best: Option) -> Option:
        """Return the text's continuation at its best length if it promises more than `best`, else `best`."""
        tokens, rate, times = 1.0 + self._others, best.rate, self._times
        for count, reached in enumerate(self.reached(), 1):
            tokens += reached
            seconds = times.verify.item(count + 1) + times.round
            if seconds <= self.live.gap * times.alone and tokens > rate * seconds:
                best, rate = Option(self.source, count, tokens, seconds), tokens / seconds
        return best

    def _tree(self, ratio: float, room: int, best: Option) -> Option:
        """Return the model's best tree, at `ratio` times the calibrated chances, if it promises more than `best`."""
        tokens, rate = 1.0 + self._others, best.rate
        for levels, reached in enumerate(self.levels(ratio, room), 1):
            tokens += reached
            nodes = min(2 * levels, room)
            seconds = self._seconds(levels, nodes)
            if seconds <= self.live.gap * self._times.alone and tokens > rate * seconds:
                best, rate = Option("model", nodes, tokens, seconds, levels), tokens / seconds
            elif levels > SHALLOW:
                break
        return best

    def levels(self, ratio: float, room: int) -> list[float]:
        """Return tokens that each further level of the model's tree brings, at `ratio` times the calibrated chance."""
        ratio = round(ratio, 2)  # so that the last result often holds
        if self._levels is None or self._levels[0] != ratio:
            self._levels = ratio, self.chances.levels(ratio) if self.drafts else []
        return self._levels[1][: max(room, 0)]

    def _seconds(self, levels: int, nodes: int) -> float:
        times = self._times
        draft = times.once + levels * (times.draft.item(1) + times.level) + longer(times.draft, 1, self.owed) / READINGS
        return draft + times.verify.item(nodes + 1) + times.round

    def force(self, batch: int, room: int) -> int:
        """Return how many forced nodes may be drafted."""
        self.weigh(self.live.at(batch, self.temperature), batch, 0, room)
        return self.room

    def forced(self, nodes: int) -> None:
        """Note that so many forced nodes are drafted: that always pays, and nothing is learnt from it."""
        self.resume(Option("forced", nodes, 1.0 + nodes, self._times.verify.item(nodes + 1) + self._times.round))
        self.follow(0, nodes)

    def follow(self, kept: int, nodes: int) -> None:
        """Note that the round's drafted chain is cut after `kept` nodes and extended by forced ones up to `nodes`."""
        self.below = [*self.below[:kept], *[0.0] * (nodes - kept + 1)]

    def log_chances(self, likelihoods: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return children's log chances if their parent comes true, by their log likelihoods."""
        return np.minimum(self.chances.log_chances(likelihoods) + self.model.log_ratio, math.log(SURE))

    def expands(self, scores: Sequence[float]) -> int:
        """Return how many nodes (`scores`: log chances, best first) have children worth verifying and a draft step."""
        if self.now.kind == "probe":
            return 0
        times, step = self._times, min(self.chances.step * self.model.ratio, SURE)
        gain, best, count, node = 0.0, 0.0, 0, self._rate * times.node
        for size, score in enumerate(scores[: len(times.draft) - 1], 1):
            gain += max(step * math.exp(score) - node, 0.0)
            worth = gain - self._rate * (float(times.draft[size]) + times.level)
            if worth > best:
                best, count = worth, size
        return count

    def verifies(self, scores: Sequence[float]) -> int:
        """Return how many nodes are worth verifying; `scores`: their log chances, best first."""
        if self.now.kind == "probe":
            return min(len(scores), 1)
        if self.allotted is not None:
            return min(len(scores), self.allotted)
        expected = np.concatenate([[0.0], np.cumsum(np.exp(scores))])
        return int((expected - self._rate * self._times.verify[1 : len(expected) + 1]).argmax())

    def promise(self, parents: Sequence[int], scores: Sequence[float]) -> None:
        """Note the model's tree as it will be verified: `parents`, and the log chances of its nodes."""
        self.below = [0.0] * len(parents)
        for node in range(1, len(parents)):
            self.below[parents[node]] += math.exp(scores[node] - scores[parents[node]] - self.model.log_ratio)

    def grown(self, shape: TreeSpec, steps: Sequence[int]) -> TreeSpec:
        """Return the shape of a tree that a device grows: as deep as decided, with all nodes of its step (`steps`).

        The last shape of a sequence alone stays if others promise hardly more, so that rounds can follow each other.
        """
        if self.now.kind == "model":
            last = self._grown
            fits = 0 < last.levels <= shape.depth and last.nodes <= shape.nodes
            expected = 1.0 + sum(self.levels(self.model.ratio, last.levels))
            if not self._others and fits and expected >= STEADY * self._rate * self._seconds(last.levels, last.nodes):
                self.now = replace(self.now, levels=last.levels, nodes=last.nodes)
            else:
                nodes = next((step for step in steps if step > self.now.nodes), shape.nodes + 1) - 1
                levels, nodes = min(self.now.levels, shape.depth), min(nodes, shape.nodes)
                self.now = self._grown = replace(self.now, levels=levels, nodes=nodes)
        self.below = [*self.chances.below(self.now.levels), 0.0]  # node d of its path lies d levels deep
        return replace(shape, depth=self.now.levels, nodes=self.now.nodes)

    def pass_over(self) -> None:
        """Make the round plain decoding, of which nothing is learnt."""
        self.resume(PLAIN)
        self.left = 0

    def was_continued(self, drafted: int) -> None:
        """Note that in this round a device drafted so many tokens of the text's continuation, at no cost."""
        known = self.continued[:drafted] if self.matched > 1 and not self.recalled else []
        tokens = 1.0 + self._others + sum(self.reached()[: len(known)])
        self.now, self.extra = Option("lookup" if drafted else "plain", drafted, tokens, self._times.alone), 0.0
        self.below = [*known, *[0.0] * (1 + drafted - len(known))]

    def resume(self, option: Option) -> None:
        """Make `option` the decision of the round that ends now, though another may have been chosen since."""
        self.now, self.guess, self.continued, self.extra = option, -1, [], 0.0
        self.below = [*self.chances.below(option.levels), 0.0]

    def record(self, path: Sequence[int], token: int) -> None:
        """Learn from the round: `path` has the accepted nodes, the root first; `token` is the first emitted one.

        So the text's continuation is judged even if it was not drafted. A node left to the next round counts as failed.
        """
        if self.rest.took:
            self.rest.decided(len(path) - 1, self.extra, self._times.alone, 1 + self._others)
        chances = [min(self.below[node], 1.0) for node in path if self.below[node]]
        accepted = min(len(path) - 1, len(chances))  # a forced token is no trial
        if self.now.kind == "lookup" or (self.now.kind == "habit" and chances):
            self.session.record(self.source, accepted, chances)
            return
        self.session.record(self.source, int(token == self.guess), self.continued[:1])
        self.session.record("model", accepted, chances)
        if self.now.kind == "probe":
            self.failed += not accepted
            self.session.probing.probed(accepted, longer(self._times.draft, 1, self.owed) / self._times.alone)


class Policy:
    """An engine's policy: every request that leaves speculation to it gets a `SequencePolicy`."""

    def __init__(
        self,
        timings: TimingTable,
        drafts: bool,
        limits: Limits = NO_LIMITS,
        clock: Callable[[], float] = time.monotonic,
        free: int = 0,
        live: LiveTimings | None = None,
    ) -> None:
        """Make an engine's policy.

        Args:
            timings: The bundle's timing table.
            drafts: Whether there is a model to draft with.
            limits: Limits on what rounds may draft.
            clock: Returns seconds, by which sessions are forgotten.
            free: Drafted nodes that cost nothing, because a lone sequence's step of one node is padded.
            live: The table as rounds correct it; None: a new one, which is told nothing.
        """
        self.timings, self.drafts, self.limits, self.free = timings, drafts, limits, free
        self.live = live or LiveTimings(timings)
        self.sessions = Sessions(clock)

    def for_request(self, temperature: float, session: str | None = None, background: bool = False) -> SequencePolicy:
        """Return a sequence's policy, with what its session, or else the engine, has learnt; from any thread.

        A request in the background knows nothing of others, and they learn nothing from it.
        """
        sessions = Sessions() if background else self.sessions
        chances, known = self.timings.chances(temperature), sessions.of(session, temperature > 0)
        return SequencePolicy(self.live, chances, temperature, self.drafts, known, self.limits, self.free)
