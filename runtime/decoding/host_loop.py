"""The decode loop on the host: draft → verify → accept → commit, for a batch of sequences.

Prefill uses the same step: a prompt's chunk is a long chain whose nodes are accepted without a check.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from copy import copy

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.executor import Executor, StepInput
from specbuild.runtime.drafting.lookup_first import LookupDrafter
from specbuild.runtime.drafting.model import Drafter, ModelDrafter
from specbuild.runtime.requests.metrics import RunStats
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.acceptance import walk
from specbuild.runtime.speculation.live import LiveTimings
from specbuild.runtime.speculation.tree import Tree

from .admission import Admission
from .emission import Emission
from .loop import DEFAULTS, LoopOptions, accounted, alone, cache_bytes, step_rows
from .planner import Planner
from .reading import Reader, step_input

# A step that prefills beside decoding sequences takes at most so many times as long as plain decoding: of those that
# decode, or of all of them, whichever is longer; else a few would stop many.
PACE, PACE_OF_ALL = 2.5, 1.75
LEAST = 2  # tokens of each prompt that such a step prefills in any case


class HostLoop:
    """Runs a target and a drafter; knows no backend, no tokenizer and no queue. See `Loop`."""

    def __init__(
        self,
        target: Executor,
        drafter: Drafter | None,
        chunk: int,
        eos: frozenset[int],
        options: LoopOptions = DEFAULTS,
        admission: Admission | None = None,
    ) -> None:
        """Make a loop over loaded models.

        Args:
            target: Executor of the target.
            drafter: What proposes the trees; None: every round is plain decoding.
            chunk: Maximum tokens of a prompt in a step.
            eos: Token ids that end a text.
            options: How the loop decodes.
            admission: Slots that another loop over the same target uses as well; None: new ones.
        """
        self.target, self.drafter, self.tally = target, drafter, RunStats()
        max_nodes = min(target.spec.max_nodes, options.sequence_nodes or target.spec.max_nodes)
        self.emission, self.planner, self._options = Emission(eos), Planner(options.limits, max_nodes), options
        self.reader = Reader(target, self.emission, chunk, options.lone_chunk)
        self.exactness, self.live = options.exactness, options.live
        self.trunk = False
        self.admission = admission or Admission(target, drafter, options.prefix_caching)
        self.check, self.pick, self.release = self.planner.check, self.admission.pick, self.admission.release
        self.cached_tokens, self.page_tokens = self.admission.cached_tokens, self.admission.page_tokens
        self.cached_texts = self.admission.cached_texts

    def round(self, sequences: Seq[Sequence]) -> None:
        """See `Loop.round`."""
        with accounted(self, sequences) as account, nvtx.range("round"):
            self.admission.enter(sequences)
            trees = self.draft(sequences)
            inputs = [step_input(s, t) for s, t in zip(sequences, trees, strict=True)]
            ahead = self.drafter.ahead(sequences) if self.drafter else nullcontext()
            with nvtx.range("verify"), ahead:
                before = self.target.seconds
                logits = self.target.step(inputs)
            if self.live:
                self._tell(self.live, account, sequences, inputs, self.target.seconds - before)
            for sequence, tree, rows in zip(sequences, trees, logits, strict=True):
                with nvtx.range("accept"), alone(sequence):
                    (self.accept if sequence.decodes else self.reader.accept)(sequence, tree, rows)

    def _tell(
        self, live: LiveTimings, account: accounted, sequences: Seq[Sequence], inputs: Seq[StepInput], seconds: float
    ) -> None:
        """Report a step's seconds and, if every sequence decodes, how many rows the trees added to it."""
        rows = step_rows(self, sum(len(each.tokens) for each in inputs))
        live.step("verify", rows, seconds)
        if all(s.decodes for s in sequences):
            account.decoded = rows - step_rows(self, sum(s.pending for s in sequences))

    def draft(self, sequences: Seq[Sequence]) -> list[Tree]:
        """Return each sequence's tree: a drafted one, the root alone, or the next chunk of its prompt."""
        drafting = self.planner.drafting(sequences) if self.drafter else []
        proposed = self.drafter.propose(drafting) if self.drafter and drafting else []
        trees = {s.slot: tree for s, tree in zip(drafting, proposed, strict=True)}
        decoding = {s.slot: trees.get(s.slot) or Tree([s.tokens[-1]]) for s in sequences if s.decodes}
        reading = [s for s in sequences if not s.decodes]
        if reading:
            taken = [s.pending - 1 + len(decoding[s.slot]) for s in sequences if s.decodes]
            chunks = self.reader.chunks(reading, self._left(taken, len(reading)), len(sequences) == 1)
            decoding |= {s.slot: chunk for s, chunk in zip(reading, chunks, strict=True)}
        return [decoding[s.slot] for s in sequences]

    def _left(self, taken: Seq[int], reading: int) -> int:
        """Return how many rows of a step prompts may fill beside decoding sequences that have `taken` rows each.

        As many as the options allow. If sequences decode and the table says what steps take, the step also keeps the
        pace, drafts not counted, which have to pay for themselves; unless that leaves less than LEAST tokens of each
        prompt.
        """
        left = (self._options.step_nodes or 1 << 30) - sum(taken)
        if self.live and taken:
            plain, everyone = step_rows(self, len(taken)), step_rows(self, len(taken) + reading)
            table = self.live.timings.at(self.live.lanes or 1)  # not corrected: it never falls with rows
            paced = max(table.rows_within(plain, PACE), table.rows_within(everyone, PACE_OF_ALL)) - plain
            left = min(left, max(paced, LEAST * reading))
        return left

    def accept(self, sequence: Sequence, tree: Tree, logits: NDArray[np.float32]) -> None:
        """Walk the tree along the target's choices, emit them, and commit the path in both caches."""
        root, drafted, path = len(sequence.tokens) - 1, sequence.shape, list[int]()

        def choose(node: int) -> int:
            return self.emission.choose(sequence, logits[node], root + tree.depths[node])

        began = time.perf_counter()
        for node, token in walk(tree, choose):
            path.append(node)
            sequence.emit(token, self.emission.eos, begins=len(path) == 1)
            if sequence.finish_reason:
                break
        walked = time.perf_counter()
        with nvtx.range("commit"):
            self.target.commit(sequence.slot, [root + node for node in path], root)
        sequence.cached = root + len(path)
        if drafted and self.drafter:
            self.drafter.commit(sequence, path)
            self.planner.record(sequence, len(tree) - 1, path, sequence.tokens[root + 1], max(tree.depths))
        elif sequence.policy and sequence.policy.rest.due and isinstance(self.drafter, LookupDrafter):
            self.drafter.texts.reflect(sequence, sequence.policy.rest)
        self.tally.accept += walked - began
        self.tally.commit += time.perf_counter() - walked

    @property
    def stats(self) -> RunStats:
        """See `Loop.stats`."""
        return copy(self.tally)

    def logits(self, tokens: list[int], count: int = 1, nodes: int | None = None) -> NDArray[np.float32]:
        """See `Loop.logits`."""
        with self.borrowed(len(tokens)):
            return self.reader.logits(tokens, count, nodes or self.reader.chunk)

    @contextmanager
    def borrowed(self, tokens: int) -> Iterator[None]:
        """See `Loop.borrowed`."""
        self.admission.borrow(0, tokens)
        try:
            yield
        finally:
            self.release(0)

    def sibling(self, looks_up: bool = True, overlap: bool = False) -> HostLoop:
        """See `Loop.sibling`."""
        habits = self.drafter.texts.habits.fresh() if isinstance(self.drafter, LookupDrafter) else None
        drafter = LookupDrafter(self.fresh_drafter(overlap), looks_up, habits)
        slots = self.admission.beside(drafter)
        return HostLoop(self.target, drafter, self.reader.chunk, self.emission.eos, self._options, slots)

    def fresh_drafter(self, overlap: bool = False) -> ModelDrafter | None:
        """See `Loop.fresh_drafter`."""
        model = self.drafter.model if isinstance(self.drafter, LookupDrafter) else None
        return model.again(overlap) if model else None

    @property
    def draft_executor(self) -> Executor | None:
        """See `Loop.draft_executor`."""
        return self.drafter.executor if self.drafter else None

    @property
    def notes(self) -> list[str]:
        """See `Loop.notes`."""
        return []

    @property
    def cache_bytes(self) -> int:
        """See `Loop.cache_bytes`."""
        return cache_bytes(self)

    def close(self) -> None:
        """See `Loop.close`."""
        self.target.close()
        if self.drafter:
            self.drafter.close()
