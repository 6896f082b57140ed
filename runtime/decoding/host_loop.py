"""The decode loop on the host: draft → verify → accept → commit, for a batch of sequences.

Prefill uses the same step: a prompt's chunk is a long chain whose nodes are accepted without a check.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.controller import Proposal
from specbuild.runtime.speculation.tree import Tree, walk

from .accounting import account
from .admission import Admission
from .emission import Emission
from .error_isolation import isolate_errors
from .loop import DEFAULTS, Loop, LoopOptions
from .planner import Planner
from .reading import Reader, step_input
from .round_result import RoundResult

# A step that prefills beside decoding sequences takes at most so many times as long as plain decoding: of those that
# decode, or of all of them, whichever is longer; else a few would stop many.
PACE, PACE_OF_ALL = 2.5, 1.75
LEAST = 2  # tokens of each prompt that such a step prefills in any case


class HostLoop(Loop):
    """Runs a target and a drafter; knows no backend, no tokenizer and no queue. See `Loop`."""

    def __init__(
        self,
        target: Executor,
        proposer: Proposer | None,
        chunk: int,
        eos: frozenset[int],
        options: LoopOptions = DEFAULTS,
        admission: Admission | None = None,
    ) -> None:
        """Make a loop over loaded models.

        Args:
            target: Executor of the target.
            proposer: What proposes the trees; None: every round is plain decoding.
            chunk: Maximum tokens of a prompt in a step.
            eos: Token ids that end a text.
            options: How the loop decodes.
            admission: Slots that another loop over the same target uses as well; None: new ones.
        """
        self._options, emission = options, Emission(eos)
        max_nodes = min(target.spec.max_nodes, options.sequence_nodes or target.spec.max_nodes)
        reader = Reader(target, emission, chunk, options.lone_chunk)
        slots = admission or Admission(target, proposer, options.prefix_caching)
        super().__init__(target, proposer, emission, Planner(options.limits, max_nodes), reader, slots, options)

    def round(self, sequences: Seq[Sequence]) -> None:
        """See `Loop.round`."""
        with account(self, sequences), nvtx.range("round"):
            self.admission.enter(sequences)
            proposals = self.propose(sequences)
            with nvtx.range("verify"):
                logits = self.verify(sequences, [proposal.tree for proposal in proposals])
            for sequence, proposal, rows in zip(sequences, proposals, logits, strict=True):
                with nvtx.range("accept"), isolate_errors(sequence):
                    if sequence.decodes:
                        self.accept(sequence, proposal, rows)
                    else:
                        self.reader.accept(sequence, proposal.tree, rows)

    def propose(self, sequences: Seq[Sequence]) -> list[Proposal]:
        """Return what each sequence adds to the step: a drafted tree, its last token, or a chunk of its prompt."""
        proposals = {s.slot: Proposal(Tree([s.tokens[-1]])) for s in sequences if s.decodes}
        drafting = self.planner.drafting(sequences) if self.proposer else []
        if self.proposer and drafting:
            drafted = self.proposer.propose(drafting, len(sequences), self.planner.now)
            proposals |= {s.slot: proposal for s, proposal in zip(drafting, drafted, strict=True)}
        reading = [s for s in sequences if not s.decodes]
        if reading:
            left = self._left(sum(len(proposal.tree) for proposal in proposals.values()), len(sequences), len(reading))
            chunks = self.reader.chunks(reading, left, len(sequences) == 1)
            proposals |= {s.slot: Proposal(chunk) for s, chunk in zip(reading, chunks, strict=True)}
        return [proposals[s.slot] for s in sequences]

    def _left(self, taken: int, sequences: int, reading: int) -> int:
        """Return how many rows of a step prompts may fill beside `taken` rows of decoding sequences.

        As many as the options allow. If sequences decode and the table says what steps take, the step also keeps the
        pace, drafts not counted, which have to pay for themselves; unless that leaves less than LEAST tokens of each
        prompt.
        """
        left, decoding = (self._options.step_nodes or 1 << 30) - taken, sequences - reading
        if self.cost and decoding:
            times = self.cost.times()  # not corrected: it never falls with rows
            paced = max(times.rows_within(decoding, PACE), times.rows_within(sequences, PACE_OF_ALL)) - decoding
            left = min(left, max(paced, LEAST * reading))
        return left

    def verify(self, sequences: Seq[Sequence], trees: Seq[Tree]) -> list[NDArray[np.float32]]:
        """Run the target over all trees in one step; return each one's logits, `float32[nodes, V]`."""
        before = self.target.seconds
        logits = self.target.step([step_input(s, tree) for s, tree in zip(sequences, trees, strict=True)])
        if self.cost and all(s.decodes for s in sequences):  # the table has no prompts
            self.cost.record("verify", sum(map(len, trees)), self.target.seconds - before)
        return logits

    def accept(self, sequence: Sequence, proposal: Proposal, logits: NDArray[np.float32]) -> None:
        """Walk the tree along the target's choices, emit them, and commit the path in both caches."""
        tree, root = proposal.tree, len(sequence.tokens) - 1

        def choose(node: int) -> int:
            return self.emission.choose(sequence, logits[node], root + tree.depths[node])

        began = time.perf_counter()
        path = self.emission.emit(sequence, walk(tree, choose))
        walked = time.perf_counter()
        with nvtx.range("commit"):
            self.target.commit(sequence.slot, [root + node for node in path], root)
        sequence.cached = root + len(path)
        if sequence.budget and self.proposer:
            self.proposer.commit(sequence, proposal, path)
            self.planner.record(RoundResult(sequence, proposal, len(tree) - 1, path, sequence.tokens[root + 1 :]))
        self.tally.accept += walked - began
        self.tally.commit += time.perf_counter() - walked

    def sibling(self, looks_up: bool = True) -> HostLoop:
        """See `Loop.sibling`."""
        proposer = Proposer(self.fresh_drafter(), looks_up)
        slots = self.admission.beside(proposer)
        return HostLoop(self.target, proposer, self.reader.chunk, self.emission.eos, self._options, slots)

    def close(self) -> None:
        """See `Loop.close`."""
        self.target.close()
        if self.proposer:
            self.proposer.close()
