"""The decode loop on the host: draft → verify → accept → commit, for a batch of sequences.

Prefill uses the same step: a prompt's chunk is a long chain whose nodes are accepted without a check.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.speculation.proposal import Proposal
from specbuild.runtime.speculation.tree import Tree, walk

from .accounting import account
from .admission import Admission
from .emission import Emission
from .error_isolation import isolate
from .loop import DEFAULTS, Loop, LoopOptions
from .reading import PACE, Reader, step_input
from .round_result import RoundResult


class HostLoop(Loop):
    """Runs a target and a drafter; knows no backend, no tokenizer and no queue. See `Loop`."""

    def __init__(
        self,
        target: Executor,
        proposer: Proposer,
        chunk: int,
        eos: frozenset[int],
        options: LoopOptions = DEFAULTS,
    ) -> None:
        """Make a loop over loaded models.

        Args:
            target: Executor of the target.
            proposer: What proposes the trees.
            chunk: Maximum tokens of a prompt in a step.
            eos: Token ids that end a text.
            options: How the loop decodes.
        """
        self._options = options
        reader = Reader(target, Emission(eos), chunk, options.lone_chunk)
        admission = Admission(target, proposer.model, options.prefix_caching)
        super().__init__(target, proposer, reader, admission, target.spec.max_nodes, options)

    def round(self, sequences: Seq[Sequence]) -> None:
        """See `Loop.round`."""
        with account(self, sequences), nvtx.range("round"):
            self.admission.enter(sequences)
            proposals = self.propose(sequences)
            logits = self.verify(sequences, [proposal.tree for proposal in proposals])
            for sequence, proposal, rows in zip(sequences, proposals, logits, strict=True):
                try:
                    if sequence.decodes:
                        path = self.accept(sequence, proposal.tree, rows)
                        self.commit(sequence, proposal, path)
                    else:
                        self.reader.accept(sequence, proposal.tree, rows)
                except BaseException as error:
                    isolate(sequence, error)

    def propose(self, sequences: Seq[Sequence]) -> list[Proposal]:
        """Return what each sequence adds to the step: a drafted tree, its last token, or a chunk of its prompt."""
        drafting = self.planner.drafting(sequences)
        drafts = self.proposer.propose(drafting, len(sequences), self.planner.current) if drafting else []
        proposals = {s.slot: Proposal(Tree([s.tokens[-1]])) for s in sequences if s.decodes}
        proposals |= {s.slot: proposal for s, proposal in zip(drafting, drafts, strict=True)}
        if prompts := [s for s in sequences if not s.decodes]:
            rows = (self._options.step_nodes or 1 << 30) - sum(len(each.tree) for each in proposals.values())
            if self.cost and proposals:  # PACE bounds the rows that decode or prefill; drafts pay for themselves
                decoding = len(sequences) - len(prompts)
                rows = min(rows, self.cost.times().rows_within(len(sequences), PACE) - decoding)
            chunks = self.reader.chunks(prompts, rows, len(sequences) == 1)
            proposals |= {s.slot: Proposal(chunk) for s, chunk in zip(prompts, chunks, strict=True)}
        return [proposals[s.slot] for s in sequences]

    def verify(self, sequences: Seq[Sequence], trees: Seq[Tree]) -> list[NDArray[np.float32]]:
        """Run the target over all trees in one step; return each one's logits, `float32[nodes, V]`."""
        before = self.target.seconds
        with nvtx.range("verify"):
            logits = self.target.step([step_input(s, tree) for s, tree in zip(sequences, trees, strict=True)])
        if self.cost and all(s.decodes for s in sequences):  # the table has no prompts
            self.cost.record("verify", sum(map(len, trees)), self.target.seconds - before)
        return logits

    def accept(self, sequence: Sequence, tree: Tree, logits: NDArray[np.float32]) -> list[int]:
        """Emit the target's choices along the tree; return the accepted nodes, the root first."""
        root_position = len(sequence.tokens) - 1

        def choose(node: int) -> int:
            return self.emission.choose(sequence, logits[node], root_position + tree.depths[node])

        with nvtx.range("accept"), self.tally.timed("accept"):
            return self.emission.emit(sequence, walk(tree, choose))

    def commit(self, sequence: Sequence, proposal: Proposal, path: Seq[int]) -> None:
        """Commit the accepted nodes' rows in both caches, and record what became of the draft."""
        root_row = sequence.cached
        with nvtx.range("commit"), self.tally.timed("commit"):
            self.target.commit(sequence.slot, [root_row + node for node in path], root_row)
            sequence.cache(root_row + len(path))
            self.proposer.commit(sequence, proposal, path)
            tokens = sequence.tokens[root_row + 1 :]
            self.planner.record(RoundResult(sequence, proposal, len(proposal.tree) - 1, path, tokens))
