"""The decode loop: draft → verify → accept → commit, on a batch of sequences.

Prompts are read by the same step: a chunk of a prompt is a long chain whose nodes are accepted unseen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq
from contextlib import nullcontext

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.executor import Executor, StepInput, share_rows
from specbuild.runtime.drafting.model import Drafter
from specbuild.runtime.errors import ExecutionError, OptionError
from specbuild.runtime.requests.metrics import RunStats
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.logprobs import TokenLogprobs
from specbuild.runtime.speculation.acceptance import walk
from specbuild.runtime.speculation.draft_limits import NO_LIMITS
from specbuild.runtime.speculation.tree import Tree


class Loop:
    """Drives a target and a drafter; knows no backend, no tokenizer and no queue."""

    def __init__(self, target: Executor, drafter: Drafter | None, chunk: int, eos: frozenset[int]) -> None:
        self.target, self.drafter, self.chunk, self.eos = target, drafter, chunk, eos
        self.lone_chunk = chunk  # of a prompt whose reading holds nobody up
        self.stats = RunStats()
        self.limits = NO_LIMITS
        self.prefix_caching = True  # what a slot's cache holds of a text, for the next one that begins the same
        self._last: list[Sequence | None] = [None] * target.batch_size  # who was in each slot last

    def round(self, sequences: Seq[Sequence]) -> None:
        """One round for every sequence: each emits at least one token, reads a chunk of its prompt, or fails alone.

        Raises whatever drafting or the step itself raises, which concerns them all.
        """
        before, emitted = self._clock(), sum(len(s.output) for s in sequences)
        with nvtx.range("round"):
            self.run(sequences)
        self._account(before, sum(len(s.output) for s in sequences) - emitted)

    def run(self, sequences: Seq[Sequence]) -> None:
        """A round, without its statistics."""
        self.enter(sequences)
        trees = self.draft(sequences)
        inputs = [self.step_input(s, t) for s, t in zip(sequences, trees, strict=True)]
        ahead = self.drafter.ahead(sequences) if self.drafter else nullcontext()
        with nvtx.range("verify"), ahead:
            logits = self.target.step(inputs)
        for sequence, tree, rows in zip(sequences, trees, logits, strict=True):
            try:
                with nvtx.range("accept"):
                    (self.accept if sequence.pending == 1 else self.read)(sequence, tree, rows)
            except Exception as error:  # of this sequence alone: the others go on
                sequence.fail(error)

    def check(self, sequence: Sequence) -> None:
        """Raises OptionError for a sequence that asks for a larger tree than is allowed, or would never get a slot."""
        max_nodes, tree = self.limits.max_draft_tokens, sequence.tree
        if max_nodes is not None and tree and tree.nodes > max_nodes and sequence.params.speculation != "auto":
            raise OptionError(
                f"tree {tree} drafts {tree.nodes} nodes, max_draft_tokens allows {max_nodes}: ask for fewer"
            )

    def pick(self, sequence: Sequence, free: Seq[int]) -> int | None:
        """Of the free slots the one whose cache holds most of a sequence's prompt; the first of equals.

        None: it has to wait until others have ended.
        """
        return max(free, key=lambda slot: self._common(sequence, slot))

    def enter(self, sequences: Seq[Sequence]) -> None:
        """Of those new to their slots: what a prompt has in common with a text in any slot's cache is not read."""
        for sequence in sequences:
            if self._last[sequence.slot] is not sequence:
                self._enter(sequence, sequence.slot)

    def _enter(self, sequence: Sequence, slot: int) -> None:
        source = max(range(len(self._last)), key=lambda other: (self._common(sequence, other), other == slot))
        rows = self._common(sequence, source)
        self._vacate(slot)
        self.admit(sequence, slot, source, rows)

    def admit(self, sequence: Sequence, slot: int, source: int, rows: int) -> None:
        """A slot is a sequence's, whose text begins with the first `rows` of what is, or was, in slot `source`."""
        self.keep(slot, source, rows)
        self._last[slot], sequence.cached, sequence.metrics.num_cached_tokens = sequence, rows, rows

    def keep(self, slot: int, source: int, rows: int) -> None:
        """A slot's caches have from now on the first `rows` of another's, or of what was in it, and no more."""
        share_rows(self.target, slot, source, rows)
        if self.drafter:
            self.drafter.keep(slot, source, rows)

    def _common(self, sequence: Sequence, slot: int) -> int:
        """How many rows of a slot's cache a sequence can use; not its last token's, whose logits are wanted."""
        last, limit = self._last[slot], min(self.kept(slot), len(sequence.tokens) - 1)
        if not last or not limit:
            return 0
        differing = np.flatnonzero(last.history[:limit] != sequence.history[:limit])
        return int(differing[0]) if len(differing) else limit

    def _vacate(self, slot: int) -> None:
        """Nobody's rows are in a slot."""
        last, self._last[slot] = self._last[slot], None
        if last and last.error:
            self.erase(slot)

    def erase(self, slot: int) -> None:
        """A sequence failed in a slot: nothing of it may reach the next one."""

    def draft(self, sequences: Seq[Sequence]) -> list[Tree]:
        """A drafted tree, the root alone, or the next chunk of the prompt."""
        drafting = [s for s in sequences if s.drafts] if self.drafter else []
        for sequence in drafting:
            sequence.limit_tree(self.limits, len(drafting))
        drafting = [s for s in drafting if s.shape]
        proposed = self.drafter.propose(drafting) if self.drafter and drafting else []
        drafted = {s.slot: tree for s, tree in zip(drafting, proposed, strict=True)}
        chunk = self.chunk if len(sequences) > 1 else self.lone_chunk
        return [drafted.get(s.slot) or Tree.chain(s.tokens[s.cached : s.cached + chunk]) for s in sequences]

    def step_input(self, sequence: Sequence, tree: Tree) -> StepInput:
        """A tree as the executor takes it: rows from the committed ones on, logits for what will be decided."""
        start = sequence.cached
        visible = None if tree.is_chain else tree.ancestors()
        wanted = len(tree) if sequence.pending == 1 else int(start + len(tree) == len(sequence.tokens))
        return StepInput(sequence.slot, start, start, tree.tokens, [start + d for d in tree.depths], visible, wanted)

    def accept(self, sequence: Sequence, tree: Tree, logits: NDArray[np.float32]) -> None:
        """Walk the tree along the target's choices, emit them, commit the path in both caches."""
        root, drafted, path = sequence.cached, sequence.drafts and sequence.shape, list[int]()

        def choose(node: int) -> int:
            return self.choose(sequence, logits[node], root + tree.depths[node])

        began = time.perf_counter()
        for node, token in walk(tree, choose):
            path.append(node)
            sequence.emit(token, self.eos)
            if sequence.finish_reason:
                break
        walked = time.perf_counter()
        with nvtx.range("commit"):
            self.target.commit(sequence.slot, [root + node for node in path], root)
        sequence.cached += len(path)
        if drafted and self.drafter:
            self.drafter.commit(sequence, path)
            drafting = sequence.metrics.speculative_decoding
            if len(tree) > 1:
                drafting.record(len(tree) - 1, len(path) - 1, max(tree.depths))
            if sequence.policy:
                sequence.policy.record(path, sequence.tokens[root + 1])
                drafting.decide(sequence.policy.now.kind)
        self.stats = self.stats.plus(accept=walked - began, commit=time.perf_counter() - walked)

    def read(self, sequence: Sequence, chunk: Tree, logits: NDArray[np.float32]) -> None:
        """Commit a chunk of the prompt; after its last one, emit the first token."""
        sequence.cached += len(chunk)
        self.target.commit(sequence.slot, (), sequence.cached)
        if len(logits):
            sequence.emit(self.choose(sequence, logits[-1], sequence.cached - 1), self.eos)

    def choose(self, sequence: Sequence, row: NDArray[np.float32], position: int) -> int:
        """The target's choice from a verified node's logits, to be emitted."""
        token = sequence.sampler.choose(row, position, ())
        self.note(sequence, row, token)
        return token

    def note(self, sequence: Sequence, row: NDArray[np.float32], token: int) -> None:
        """Refuse a choice whose logit is not finite (ExecutionError); note its log-probability if asked."""
        if not math.isfinite(row[token]):
            raise ExecutionError(f"the model gave {row[token]} as a token's logit: build the bundle from sound weights")
        if sequence.params.logprobs is not None:
            sequence.logprobs.append(TokenLogprobs.of(row, token, sequence.params.logprobs))

    def _account(self, before: tuple[float, float, float], emitted: int) -> None:
        """Add a round that began at `before` to the statistics."""
        total, draft, verify = (now - then for now, then in zip(self._clock(), before, strict=True))
        self.stats = self.stats.plus(rounds=1, emitted=emitted, total=total, draft=draft, verify=verify)

    def _clock(self) -> tuple[float, float, float]:
        """Seconds: now, and spent so far in the draft and in the target."""
        return time.perf_counter(), self.draft_executor.seconds if self.draft_executor else 0.0, self.target.seconds

    def logits(self, tokens: list[int], count: int = 1, nodes: int | None = None) -> NDArray[np.float32]:
        """The target's logits after each of the last `count` tokens of a text, `float32[count, V]`.

        Read into slot 0, which must be free, at most `nodes` a step.
        """
        self._vacate(0)
        size, rows = nodes or self.chunk, list[NDArray[np.float32]]()
        try:
            for start in range(0, len(tokens), size):
                part = tokens[start : start + size]
                wanted = min(max(start + len(part) - len(tokens) + count, 0), len(part))
                step_input = StepInput(0, start, start, part, range(start, start + len(part)), None, wanted)
                rows.append(self.target.step([step_input])[0].copy())
        finally:
            self.release(0)
        return np.concatenate(rows)

    def release(self, slot: int) -> None:
        """A sequence has ended; its rows stay, for a text that begins the same."""
        self.target.commit(slot, (), self.kept(slot))
        if self.drafter:
            self.drafter.release(slot)

    def kept(self, slot: int) -> int:
        """Rows of a slot's cache that are of use to anybody."""
        last = self._last[slot]
        return last.cached if last and self.prefix_caching and not last.error else 0

    def cached_tokens(self) -> tuple[int, ...]:
        """By slot, tokens of its cache that a text which begins the same need not read again; from any thread."""
        return tuple(map(self.kept, range(len(self._last))))

    @property
    def page_tokens(self) -> int | None:
        """Tokens that all pages of the caches hold together; None where each slot has rows of its own."""
        return None

    @property
    def draft_executor(self) -> Executor | None:
        """The draft model; None where none drafts."""
        return self.drafter.executor if self.drafter else None

    @property
    def notes(self) -> list[str]:
        """What runs otherwise than it should, and why."""
        return []

    @property
    def cache_bytes(self) -> int:
        """Bytes of both caches."""
        return self.target.cache_bytes + (self.draft_executor.cache_bytes if self.draft_executor else 0)

    def close(self) -> None:
        """Free the models and the caches."""
        self.target.close()
        if self.drafter:
            self.drafter.close()
