"""Prefill: the target runs texts in chunks, for prompts and for texts whose logits are wanted.

A chunk is a long chain whose nodes are accepted without a check.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.executor import Executor, StepInput
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.logprobs import TokenLogprobs
from specbuild.runtime.speculation.tree import Tree

from .emission import Emission
from .error_isolation import isolate

Logits = NDArray[np.float32]
PACE = 2.0  # a step that prefills beside others takes at most so many times as long as if all decoded: they wait


class Reader:
    """Prefills chunks of at most `chunk` tokens, `lone_chunk` of a lone sequence, `scored` where all have logits."""

    def __init__(
        self,
        target: Executor,
        emission: Emission,
        chunk: int,
        lone_chunk: int | None = None,
        scored: int | None = None,
    ) -> None:
        self._target, self.emission, self.chunk, self._lone_chunk = target, emission, chunk, lone_chunk or chunk
        self._scored = min(chunk, scored or chunk)

    def chunks(self, prompts: Seq[Sequence], rows: int, alone: bool) -> list[Tree]:
        """Return the next chunks of prompts that share `rows` rows of a step evenly, as far as each has tokens."""
        max_nodes = self._lone_chunk if alone else self.chunk
        limits = [max_nodes if s.params.prompt_logprobs is None else min(self._scored, max_nodes) for s in prompts]
        sizes = fair([min(s.pending, limit) for s, limit in zip(prompts, limits, strict=True)], rows)
        return [Tree.chain(s.tokens[s.cached :][:size]) for s, size in zip(prompts, sizes, strict=True)]

    def run(self, sequences: Seq[Sequence]) -> None:
        """Prefill a chunk of each prompt in a step without drafts; a prompt that ends here emits its first token."""
        chunks = self.chunks(sequences, 1 << 30, len(sequences) == 1)
        with nvtx.range("verify"):
            logits = self._target.step([step_input(s, chunk) for s, chunk in zip(sequences, chunks, strict=True)])
        for sequence, chunk, rows in zip(sequences, chunks, logits, strict=True):
            try:
                with nvtx.range("accept"):
                    self.accept(sequence, chunk, rows)
            except BaseException as error:
                isolate(sequence, error)

    def accept(self, sequence: Sequence, chunk: Tree, logits: Logits) -> None:
        """Commit a chunk of the prompt; after its last one, emit the first token."""
        count, start = sequence.params.prompt_logprobs, sequence.cached
        sequence.cache(start + len(chunk))
        self._target.commit(sequence.slot, (), sequence.cached)
        if count is not None:
            if not start:
                sequence.prompt_logprobs.append(None)
            following = sequence.tokens[start + 1 : sequence.cached + 1]
            for row, token in zip(logits, following, strict=False):  # the prompt's last token has none
                sequence.prompt_logprobs.append(TokenLogprobs.of(row, token, count))
        if sequence.cached == len(sequence.tokens):
            sequence.emit(self.emission.choose(sequence, logits[-1], sequence.cached - 1), self.emission.eos)

    def logits(self, tokens: list[int], count: int, size: int) -> Logits:
        """Return the target's logits after each of the last `count` tokens of a text, `float32[count, V]`.

        The text is prefilled into slot 0, at most `size` tokens a step.
        """
        size, logits = size if count == 1 else min(size, self._scored), list[Logits]()
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            rows = min(max(start + len(part) - len(tokens) + count, 0), len(part))
            chunk = StepInput(0, start, start, part, range(start, start + len(part)), None, rows)
            logits.append(self._target.step([chunk])[0].copy())
        return np.concatenate(logits)


def fair(sizes: Seq[int], rows: int) -> list[int]:
    """Divide `rows` evenly among chunks of at most such sizes; what one leaves goes to others. At least 1 each."""
    shares, free = [0] * len(sizes), rows
    order = sorted(range(len(sizes)), key=lambda at: sizes[at])
    for number, at in enumerate(order):
        shares[at] = max(min(sizes[at], free // (len(order) - number)), 1)
        free -= shares[at]
    return shares


def step_input(sequence: Sequence, tree: Tree) -> StepInput:
    """Return a tree as the executor takes it, with rows from the first uncommitted one on.

    Logits are wanted for every node of a drafted tree, but in prefill only for the prompt's last token, unless all of
    its log-probabilities are.
    """
    start, logits = sequence.cached, len(tree)
    if not sequence.decodes and sequence.params.prompt_logprobs is None:
        logits = int(start + len(tree) == len(sequence.tokens))
    positions = [start + depth for depth in tree.depths]
    visible = None if tree.is_chain else tree.ancestors()
    return StepInput(sequence.slot, start, start, tree.tokens, positions, visible, logits)
