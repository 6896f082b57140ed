"""One decision a round for all its sequences together: nodes go where they are worth most.

Plain decoding emits one token of each sequence; what else a step verifies costs by the sum of its rows, no matter whose
they are. So the candidates of all sequences are ranked by the worth of a row, and as many are taken as together promise
most tokens a second. The levels of a draft model are steps shared by all sequences that draft with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from .option import Option
from .policy import MARGIN, READINGS, SHALLOW, SequencePolicy
from .timings import longer, seconds_at


@dataclass(frozen=True, slots=True)
class Wish:
    """A sequence's possible draft: tokens that matched, nodes that it has room for, and rows that its text needs."""

    policy: SequencePolicy
    matched: int
    room: int
    pending: int = 1


@dataclass(frozen=True, slots=True)
class _Plan:
    """A round's expected tokens and seconds, and the nodes of each sequence's draft, from its text or the model."""

    tokens: float
    seconds: float
    nodes: tuple[int, ...]
    models: frozenset[int] = frozenset()
    levels: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Batch:
    """Decides a round of several sequences together, and divides verified nodes once the model's trees are grown.

    Other sequences in the step, at rest or prefilling, count as if they decoded plainly: a prompt's rows take the same
    whatever is drafted. `rows`: rows of its step as decided, without the model's trees. `rate`: λ, tokens a second.
    """

    def __init__(self, wishes: Sequence[Wish], padded: bool = False) -> None:
        """Price the possible drafts.

        Args:
            wishes: What each sequence might draft.
            padded: Whether the step has as many nodes of every lane as of the one that drafts most, as on a device.
        """
        first = wishes[0].policy
        self.wishes, self.padded = wishes, padded
        self._count = count = max(first.together, len(wishes))  # sequences in the step
        self._times = times = first.live.at(count, max(wish.policy.temperature for wish in wishes))
        self.rows = count + sum(wish.pending - 1 for wish in wishes)
        seen = first.live.share(times, 0 if padded else self.rows, count)
        for wish in wishes:
            wish.policy.weigh(seen, len(wishes), wish.matched, wish.room, count - 1)
        # Seconds of a draft step, and of one more row of the target.
        self._level, self._row = seconds_at(times.draft_rows, count), 0.0 if padded else times.node / times.lanes
        # By sequence: the worth of each token of its continuation, and of the model's tree, by levels from 0.
        self._texts = [wish.policy.reached() for wish in wishes]
        levels = (wish.policy.levels(wish.policy.model.ratio, wish.policy.room) for wish in wishes)
        self._trees = [[0.0, *accumulate(each)] for each in levels]

    def decide(self) -> None:
        """Set what every sequence does in the round."""
        count, seconds, first = self._count, self._seconds(0, 0, drafts=False), self.wishes[0].policy
        brought = sum(wish.policy.brought for wish in self.wishes)
        plain = _Plan(count + brought, seconds, (0,) * len(self.wishes))
        # Seconds of the longest round that is allowed, and by sequence of the longest that does not slow it.
        self._most = seconds * min(first.live.gap, 1 + max(first.leads[1], 0.0))
        self._fair = [seconds * (1 + max(wish.policy.leads[0], 0.0)) for wish in self.wishes]
        best, decided = self._best(plain), list[Option]()
        self.rate, alone = best.rate, Option("plain", 0, plain.tokens, plain.seconds)
        least = plain.rate * max(first.limits.min_expected_speedup, 1 + (MARGIN - 1) / count)
        for number, nodes in enumerate(best.nodes):
            option = alone
            if number in best.models:
                levels = min(best.levels, len(self._trees[number]) - 1)
                option = Option("model", nodes, best.tokens, best.seconds, levels)
            elif nodes:
                option = Option(self.wishes[number].policy.source, nodes, best.tokens, best.seconds)
                self.rows += nodes
            decided.append(option)
        free = first.free  # padding rows cost nothing
        left = free * count if self.padded else -self.rows % (1 + free)
        left = 0 if best.models else left
        prober = self._prober(decided, alone, best)
        for wish, option in zip(self.wishes, decided, strict=True):
            policy, probe = wish.policy, self._probe(wish.policy) if wish.policy is prober else 0.0
            policy.left = min(left, free) if option is alone else 0
            policy.settle(option, alone, least, probe)
            if option.nodes:
                policy.extra *= option.nodes / sum(best.nodes)
            left -= policy.left

    def _prober(self, decided: Sequence[Option], alone: Option, best: _Plan) -> SequencePolicy | None:
        """Return the sequence that probes in this round: at most one, which must not slow the others.

        It is one for which it is time, and of these the one whose probes have failed least often.
        """
        most = min(self._most, *self._fair) - (best.seconds - alone.seconds if best.models else 0.0)
        plain = (w.policy for w, option in zip(self.wishes, decided, strict=True) if option is alone)
        could = [p for p in plain if p.drafts and not p.live.plain_due and self._probe(p) <= most]
        due = {key for key, each in {id(p.session.probing): p.session.probing for p in could}.items() if each.due()}
        return min((p for p in could if id(p.session.probing) in due), key=lambda p: p.failed, default=None)

    def _probe(self, policy: SequencePolicy) -> float:
        """Return the seconds of a round in which this sequence probes and nobody else drafts."""
        return self._seconds(1, 1) + self._drafting(1, [policy])

    def _drafting(self, levels: int, policies: Sequence[SequencePolicy]) -> float:
        """Return the seconds of drafting so many levels for these sequences, with its share of reading their texts."""
        times = self._times
        reading = sum(longer(times.draft_rows, len(self.wishes), policy.owed) for policy in policies)
        step = self._level + times.level * len(policies) / times.lanes
        return times.once + levels * step + reading / READINGS

    def _best(self, plain: _Plan) -> _Plan:
        """Return the best of the plans that promise their margin over plain decoding."""
        limits, live = self.wishes[0].policy.limits, self.wishes[0].policy.live
        best, score = plain, plain.rate
        if live.plain_due:
            return plain
        texts = self._from_texts(plain)
        drawn = [(sum(chances[:nodes]), nodes) for chances, nodes in zip(self._texts, texts.nodes, strict=True)]
        depths = range(max(map(len, self._trees)))
        for levels in (n for n in depths if not self.padded or not n & (n - 1)):  # a device has a graph for each
            if not levels or self._at_best(levels, drawn, plain) > score:
                plan = self._with_model(levels, texts, drawn, max(best.rate, plain.rate), plain) if levels else texts
                found = self._score(plan, plain)
                if found > score and plan.rate >= plain.rate * limits.min_expected_speedup:
                    best, score = plan, found
                    continue
            if levels > SHALLOW:
                break
        return best

    def _at_best(self, levels: int, drawn: Sequence[tuple[float, int]], plain: _Plan) -> float:
        """Return a bound above the score of any plan of so many levels, as if all drafted with the rows of one."""
        brought = sum(max(self._tree(at, levels), text) for at, (text, _) in enumerate(drawn))
        grown = min(2 * levels, *(wish.policy.room for wish in self.wishes))
        seconds = self._seconds(grown, grown) + self._times.once + levels * self._level
        return (self._count + brought) / seconds - (MARGIN - 1) / plain.seconds

    def _tree(self, number: int, levels: int) -> float:
        """Return the worth of `levels` levels of the model's tree to a sequence, or of as many as it has room for."""
        tree = self._trees[number]
        return tree[levels if levels < len(tree) else -1]

    def _score(self, plan: _Plan, plain: _Plan) -> float:
        """Return tokens a second, less the margin for each sequence that drafts at a cost."""
        paying = sum(number in plan.models or nodes > 0 for number, nodes in enumerate(plan.nodes))
        return plan.rate - (MARGIN - 1) * paying / plain.seconds

    def _from_texts(self, plain: _Plan) -> _Plan:
        """Return the best plan of continuations of texts alone; the likeliest token comes first."""
        units = ((-chance, number) for number, chances in enumerate(self._texts) for chance in chances)
        best, tokens, nodes, fair = plain, float(self._count), list(plain.nodes), self._fair.copy()
        most, rate = 0, best.rate
        for count, (worth, number) in enumerate(sorted(units), 1):
            tokens, nodes[number] = tokens - worth, nodes[number] + 1
            fair[number] -= worth * plain.seconds
            most = max(most, nodes[number])
            seconds = self._seconds(count, most)
            if seconds > self._most:
                break
            if tokens / seconds > rate and seconds <= min(fair):
                best, rate = _Plan(tokens, seconds, tuple(nodes)), tokens / seconds
        return best

    def _with_model(
        self, levels: int, texts: _Plan, drawn: Sequence[tuple[float, int]], rate: float, plain: _Plan
    ) -> _Plan:
        """Return the plan in which the model drafts `levels` levels wherever that is worth more than the text's draft.

        `drawn`: what each sequence's text is worth in the plan `texts`, and how many rows it adds. `rate`: tokens a
        second that a row has to be worth.
        """
        models, nodes, fair = list[int](), list(texts.nodes), self._most
        row, tokens = rate * self._row, float(self._count)
        for number, (wish, (text, more)) in enumerate(zip(self.wishes, drawn, strict=True)):
            tree = self._tree(number, levels)
            if tree > text:
                grown = min(2 * levels, wish.policy.room)
                if tree - text > row * (grown - more):
                    models.append(number)
                    nodes[number], text = grown, tree
            tokens, fair = tokens + text, min(fair, self._fair[number] + text * plain.seconds)
        drafting = self._drafting(levels, [self.wishes[number].policy for number in models])
        seconds = self._seconds(sum(nodes), max(nodes)) + drafting
        if not models or seconds > fair:
            return texts
        return _Plan(tokens, seconds, tuple(nodes), frozenset(models), levels)

    def share(self, grown: Sequence[tuple[SequencePolicy, Sequence[float]]]) -> None:
        """Set how many nodes of each tree are verified; `grown`: policies, and their nodes' log chances, best first."""
        if not grown:
            return
        chances = np.concatenate([np.exp(np.asarray(scores, dtype=np.float64)) for _, scores in grown])
        whose = np.repeat(np.arange(len(grown)), [len(scores) for _, scores in grown])
        order = np.argsort(-chances, kind="stable")
        expected = np.concatenate([[0.0], np.cumsum(chances[order])])
        seconds = np.array([seconds_at(self._times.verify_rows, self.rows + count) for count in range(len(expected))])
        counts = np.bincount(whose[order[: int((expected - self.rate * seconds).argmax())]], minlength=len(grown))
        for (policy, scores), count in zip(grown, counts.tolist(), strict=True):
            policy.allotted = min(count, len(scores))

    def _seconds(self, drafted: int, most: int, drafts: bool = True) -> float:
        """Return the seconds of a round that verifies `drafted` nodes, `most` of one sequence; not of drafting them."""
        rows = self._times.lanes * (1 + most) if self.padded else self.rows + drafted
        return self._times.of_round(rows, self._count, drafts)
