"""Drafters, which propose a round's trees: their protocols, and the one that runs a draft model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.executor import Executor, StepInput, share_rows
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.sampler import Sampler
from specbuild.runtime.speculation.live import LiveTimings
from specbuild.runtime.speculation.policy import SequencePolicy
from specbuild.runtime.speculation.tree import Tree, TreeSpec
from specbuild.runtime.speculation.tree_growth import Growth, best_tokens, likelihoods

DrafterName = Literal["model", "ngram"]
Share = Callable[[Seq[tuple[SequencePolicy, Seq[float]]]], None]
PATIENCE = 4  # tokens outside top-p that the draft skips before it stops looking for children
ONE = TreeSpec.parse("chain:1")


class KeepsRows(Protocol):
    """The holder of a draft's cache, which has the same slots as the target's."""

    @property
    def executor(self) -> Executor | None:
        """The executor of the draft model; None if no model drafts."""
        ...

    def keep(self, slot: int, source: int, rows: int) -> None:
        """Set up a slot whose new sequence begins with the first `rows` tokens of slot `source`'s last text."""
        ...

    def release(self, slot: int) -> None:
        """Note that a slot's sequence has ended."""
        ...


class Drafter(KeepsRows, Protocol):
    """Proposes trees, and is told which path of each was accepted."""

    def propose(self, sequences: Seq[Sequence]) -> list[Tree]:
        """Return a tree per sequence, its root the sequence's last token; it may be the root alone."""
        ...

    def ahead(self, sequences: Seq[Sequence]) -> AbstractContextManager[None]:
        """Draft possible trees of the next round while inside; `sequences` were just proposed to."""
        ...

    def commit(self, sequence: Sequence, path: Seq[int]) -> None:
        """Note the accepted nodes of the tree just proposed; `path`: the nodes, the root first."""
        ...

    def close(self) -> None:
        """Free what the drafter holds."""
        ...


@dataclass(slots=True)
class Text:
    """A text to draft for: a sequence's tokens, or a guess at how they go on."""

    slot: int
    tokens: list[int]
    sampler: Sampler
    growth: Growth


class ModelDrafter:
    """Drafts with a small language model, level by level: a step runs only new nodes, keys and values stay in place.

    Its cache may lack the last accepted leaf, the bonus token and what was emitted while it was not asked; it catches
    up before it drafts. With `overlap` it drafts on, in a thread of its own, while the target verifies, as if each
    tree's likeliest leaf came true and the draft's own choice after it. If that happens, the next tree is ready.
    Otherwise the rows that the guess shares with the text are kept, and the draft catches up with the rest.
    """

    def __init__(
        self,
        executor: Executor,
        chunk: int,
        overlap: bool = False,
        tokens: NDArray[np.int64] | None = None,
        cached: list[int] | None = None,
    ) -> None:
        """Make a drafter over a loaded draft model.

        Args:
            executor: Executor of the draft.
            chunk: Maximum nodes of a text in a step.
            overlap: Whether it goes on drafting while the target verifies.
            tokens: Token id of each column of the logits; None: the column's number.
            cached: By slot, tokens whose rows are cached, shared with another drafter of the same model; None: its own.
        """
        self.executor, self._chunk, self._tokens = executor, chunk, tokens
        self.guessed = self.hit = 0  # rounds drafted ahead, and those of them that came true
        self.cached = cached or [0] * executor.batch_size  # per slot: tokens whose rows are committed
        self._growth: dict[int, Growth] = {}
        self._guesses: dict[int, Text] = {}
        self._thread = ThreadPoolExecutor(1, "specbuild-draft") if overlap else None
        self.share: Share | None = None  # decides how many nodes of each tree are verified; None: each policy does
        self.live: LiveTimings | None = None  # is told what steps take, unless they overlap the target's

    def again(self, overlap: bool = False) -> Self:
        """Return another drafter of the same model, which has seen no text yet."""
        return type(self)(self.executor, self._chunk, overlap, self._tokens)

    def growth(self, slot: int) -> Growth:
        """Return how the tree just proposed for a slot grew."""
        return self._growth[slot]

    def propose(self, sequences: Seq[Sequence]) -> list[Tree]:
        """Grow all sequences' trees together, one draft step for each level."""
        texts = [self._text(s, s.shape) for s in sequences if s.shape]
        self._grow([text for text in texts if not text.growth.depth])
        for text, sequence in zip(texts, (s for s in sequences if s.shape), strict=True):
            if text.sampler.foresees:
                text.growth.prolong(text.sampler.follow, sequence.limit - len(text.tokens) - 1)
        self._growth.update((text.slot, text.growth) for text in texts)
        if self.share:
            self.share([(p, t.growth.ranked()) for t in texts if (p := t.growth.policy) and p.now.kind == "model"])
        return [text.growth.tree() for text in texts]

    def _text(self, sequence: Sequence, shape: TreeSpec) -> Text:
        guess = self._guesses.pop(sequence.slot, None)
        if guess and guess.tokens == sequence.tokens and guess.growth.spec == shape:
            self.hit += 1
            return guess
        growth = Growth(shape, Tree([sequence.tokens[-1]]), policy=sequence.policy)
        return Text(sequence.slot, sequence.tokens, sequence.sampler, growth)

    def _grow(self, growing: list[Text]) -> None:
        """Grow all levels of all texts' trees."""
        logits = self._catch_up(growing) if growing else []
        while growing:
            for text, rows in zip(growing, logits, strict=True):
                text.growth.grow(*self._children(text, rows))
            most = self.executor.spec.capacity  # near the end of the longest text they may end a tree
            ends = [self.cached[text.slot] + text.growth.run + len(text.growth.frontier) for text in growing]
            growing = [text for text, end in zip(growing, ends, strict=True) if not text.growth.done and end <= most]
            if growing:
                with nvtx.range("draft level"):
                    logits = self._step([self._level(text) for text in growing])

    def _catch_up(self, texts: Seq[Text]) -> list[NDArray[np.float32]]:
        """Run what each text's cache lacks, its last token included, and return the logits after it."""
        while True:
            behind = [text for text in texts if self._behind(text) > self._chunk]
            if not behind:
                with nvtx.range("draft level"):
                    return self._step([self._last(text) for text in texts])
            self.executor.step([self._chain(text, 0) for text in behind])

    def _step(self, inputs: Seq[StepInput]) -> list[NDArray[np.float32]]:
        before, logits = self.executor.seconds, self.executor.step(inputs)
        if self.live and not self._thread:
            self.live.step("draft", sum(len(each.tokens) for each in inputs), self.executor.seconds - before)
        return logits

    def _behind(self, text: Text) -> int:
        """Return how many rows a text's cache lacks."""
        return len(text.tokens) - self.cached[text.slot]

    def _last(self, text: Text) -> StepInput:
        """Return the last chunk, whose logits give the first level."""
        return self._chain(text, 1)

    def _chain(self, text: Text, logits: int) -> StepInput:
        start = self.cached[text.slot]
        stop = min(len(text.tokens) - (not logits), start + self._chunk)  # the last token is left for the last step
        self.cached[text.slot] = stop
        return StepInput(text.slot, start, start, text.tokens[start:stop], range(start, stop), None, logits)

    def _level(self, text: Text) -> StepInput:
        """Return the step input that runs a growth's frontier."""
        growth, committed = text.growth, self.cached[text.slot]
        nodes, start = growth.frontier, committed + growth.run
        visible = growth.place()
        tokens = [growth.pool.tokens[node] for node in nodes]
        positions = [committed - 1 + growth.depth] * len(nodes)
        return StepInput(text.slot, start, committed, tokens, positions, visible, len(nodes))

    def _children(self, text: Text, logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the frontier's best children by the target's own processors and noise, and their log likelihoods."""
        tokens, likely = self._best(text, logits)
        return tokens, text.growth.policy.log_chances(likely) if text.growth.policy else likely

    def _best(self, text: Text, logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        growth = text.growth
        if text.sampler.greedy:
            columns, likely = best_tokens(logits, growth.spec.branch)
            return columns if self._tokens is None else self._tokens[columns], likely
        if self._tokens is not None:
            logits = spread(logits, self._tokens, text.sampler.vocab_size)
        position = len(text.tokens) - 1 + growth.depth
        if (together := text.sampler.scores(logits, position)) is not None:
            return best_tokens(together, growth.spec.branch)
        tokens = np.zeros((len(logits), growth.spec.branch), dtype=np.int64)
        scores = np.full(tokens.shape, -np.inf)
        for i, (node, row) in enumerate(zip(growth.frontier, logits, strict=True)):
            path, branch = [*growth.before, *growth.pool.path(node)], growth.spec.branch
            ranked = text.sampler.drafted(row, position, path, PATIENCE, branch)
            for j, (token, score) in enumerate(islice(ranked, branch)):
                tokens[i, j], scores[i, j] = token, score
        return tokens, likelihoods(scores)  # under noise, a guess at how likely the target chooses the same

    @contextmanager
    def ahead(self, sequences: Seq[Sequence]) -> Iterator[None]:
        """See `Drafter.ahead`; the seconds are not counted, since the target runs meanwhile."""
        if self._thread is None:
            yield
            return
        seconds, job = self.executor.seconds, self._thread.submit(self._guess, sequences)
        try:
            yield
        finally:
            job.result()
            self.executor.seconds = seconds

    def _guess(self, sequences: Seq[Sequence]) -> None:
        """Draft what would follow the likeliest leaf of each tree and the draft's own choice after that."""
        guesses, drafted = list[Text](), {s.slot: s for s in sequences if s.slot in self._growth}
        for slot, sequence in drafted.items():
            growth = self._growth[slot]
            path = growth.likeliest()
            tokens = [growth.pool.tokens[node] for node in path]
            if path and len(sequence.tokens) + len(path) + 2 < sequence.limit:
                self._move(slot, [growth.rows[node] for node in path[:-1]])
                first = Growth(ONE, Tree(tokens[-1:]), tokens)
                guesses.append(Text(slot, [*sequence.tokens, *tokens], sequence.sampler, first))
        self._grow(guesses)
        self._guesses = {guess.slot: guess for guess in guesses}
        guesses = [guess for guess in guesses if len(guess.growth.pool) > 1]
        for guess in guesses:
            sequence, bonus = drafted[guess.slot], guess.growth.pool.tokens[1]
            before = [*guess.growth.before, bonus]
            guess.tokens.append(bonus)
            guess.growth = Growth(sequence.shape or ONE, Tree([bonus]), before, policy=sequence.policy)
        self._grow(guesses)
        self.guessed += len(guesses)

    def commit(self, sequence: Sequence, path: Seq[int]) -> None:
        """See `Drafter.commit`; keeps the rows of accepted nodes that were run. The root's row is in place."""
        slot = sequence.slot
        growth, guess = self._growth.pop(slot), self._guesses.get(slot)
        if guess is None:
            kept = growth.kept
            self._move(slot, [growth.rows[kept[node]] for node in path[1:] if node < len(kept)])
            return
        before = guess.growth.before
        same = len(guess.tokens) - len(before)  # tokens before the guess
        emitted = sequence.tokens[same:]
        for one, other in zip(before, emitted, strict=False):
            if one != other:
                break
            same += 1
        self.cached[slot] = min(same, self.cached[slot])
        ready = guess.growth.run if before == emitted else 0  # rows of the next tree, which is ready
        self.executor.commit(slot, (), self.cached[slot] + ready)

    def _move(self, slot: int, rows: Seq[int]) -> None:
        """Commit rows by moving them behind the committed ones, from which they are counted; −1: no row."""
        start = self.cached[slot]
        moved = [start + row for row in rows if row >= 0]
        self.executor.commit(slot, moved, start)
        self.cached[slot] = start + len(moved)

    def keep(self, slot: int, source: int, rows: int) -> None:
        """See `Drafter.keep`; keeps as many of the rows as the cache has."""
        self._guesses.pop(slot, None)
        self.cached[slot] = min(rows, self.cached[source])
        share_rows(self.executor, slot, source, self.cached[slot])

    def release(self, slot: int) -> None:
        """See `Drafter.release`; forgets the slot's tree."""
        self._growth.pop(slot, None)
        self._guesses.pop(slot, None)
        self.executor.commit(slot, (), self.cached[slot])

    def close(self) -> None:
        """Free the draft model."""
        if self._thread:
            self._thread.shutdown()
        self.executor.close()


def spread(logits: NDArray[np.float32], tokens: NDArray[np.int64], vocab_size: int) -> NDArray[np.float32]:
    """Return logits `[n, columns]` by token, `[n, V]`; −inf for tokens without a column."""
    full = np.full((len(logits), vocab_size), -np.inf, dtype=np.float32)
    full[:, tokens] = logits
    return full
