"""The EAGLE-3 drafter gives its head the target's hidden states of the text and the head's own of what it drafts."""

import zlib

import numpy as np
import pytest
from device_requests import run
from hash_models import VOCAB, HashExecutor, HashModel, growths, plain_text, sequence_of
from proposed_trees import proposed_trees

from specbuild.runtime import SamplingParams
from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.drafting.eagle3 import EagleDrafter
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.speculation.tree import Tree, TreeSpec
from specbuild.runtime.speculation.tree_growth import Growth, best_tokens

CAPACITY, CHUNK = 256, 8


def state_of(*parts):
    key = zlib.crc32(repr(parts).encode())
    return float(key >> 16), float(key & 0xFFFF)


class Target(HashExecutor):
    """Whose hidden state of a token is a hash of the text up to it."""

    def hidden(self, slot):
        states, tokens = np.full((self.spec.capacity, 2), -1, dtype=np.float32), list[int]()
        for row, (position, token) in enumerate(self.rows[slot]):
            if position != row:
                break
            tokens.append(token)
            states[row] = state_of(*tokens)
        return states


class Head(HashExecutor):
    """An executor whose rows are (position, token, state that it was given).

    Its logits are a hash of all that a node sees; its own hidden state one of what it was given in that row.
    """

    def __init__(self, model, batch_size):
        super().__init__(model, batch_size, CAPACITY, 64)
        self.spec = ModelSpec("head", 1, 1, 1, VOCAB, CAPACITY, 64, hidden=2, reads_hidden=True)
        self.states = np.zeros((batch_size, CAPACITY, 2), dtype=np.float32)

    def rows_of(self, step_input):
        assert step_input.hidden is not None
        given = [tuple(state) for state in step_input.hidden.tolist()]
        for index, (token, state) in enumerate(zip(step_input.tokens, given, strict=True)):
            self.states[step_input.slot, step_input.start + index] = state_of("own", state, token)
        return list(zip(step_input.positions, step_input.tokens, given, strict=True))

    def text_of(self, rows):
        return numbers([row[1:] for row in rows])

    def commit(self, slot, rows, start):
        super().commit(slot, rows, start)
        self.states[slot, start : start + len(rows)] = self.states[slot, list(rows)]
        self.states[slot, start + len(rows) :] = -1

    def copy(self, slot, source, rows):
        super().copy(slot, source, rows)
        self.states[slot, :rows] = self.states[source, :rows]

    def hidden(self, slot):
        return self.states[slot]


def numbers(rows):
    return [number for token, state in rows for number in (token, *map(int, state))]


def after(model, text, path):
    """The head's logits after a text and a drafted path, from the definition: no cache, no steps."""
    rows = [(text[i + 1], state_of(*text[: i + 1])) for i in range(len(text) - 1)]
    for token in path:
        rows.append((token, state_of("own", rows[-1][1], rows[-1][0])))
    return model(numbers(rows))


def wanted(model, text, shape):
    growth = Growth(TreeSpec.parse(shape), Tree([text[-1]]))
    while not growth.done:
        rows = np.stack([after(model, text, growth.pool.path(node)) for node in growth.frontier])
        growth.grow(*best_tokens(rows, growth.spec.branch))
    return growth.tree()


@pytest.fixture
def make():
    def make(seed=0, slots=1, chunk=CHUNK, **options):
        target, head = Target(HashModel(seed), slots, CAPACITY, 64), Head(HashModel(seed + 50), slots)
        return target, head, EagleDrafter(head, chunk, target, **options)

    return make


def read(target, slot, tokens):
    """The target has seen a text but for its last token."""
    rows = [(position, token) for position, token in enumerate(tokens[:-1])]
    target.rows[slot] = rows + [(-1, -1)] * (CAPACITY - len(rows))


@pytest.mark.parametrize(("common", "kept"), [(0, 0), (1, 0), (2, 1), (4, 3)])
def test_a_common_beginning_keeps_a_row_less(make, common, kept):
    """The last one's pairs its state with a token that the other text does not have."""
    target, head, drafter = make(slots=2)
    text, other = [3, 4, 5, 6, 7], [3, 4, 5, 6, 7]
    other[common:] = [9, 8, 9, 8, 9][: 5 - common]
    for slot, tokens in enumerate((text, other)):
        read(target, slot, tokens)
    growths(drafter, sequence_of(text, SamplingParams(speculation="chain:3"), slot=0))
    drafter.release(0)
    drafter.keep(1, 0, common)
    head.steps.clear()
    (growth,) = growths(drafter, sequence_of(other, SamplingParams(speculation="chain:3"), slot=1))
    assert growth.tree() == wanted(head.model, other, "chain:3")
    assert (head.steps[0][0].slot, head.steps[0][0].start) == (1, kept)


@pytest.mark.parametrize("shape", ["chain:1", "chain:4", "topk:2,3", "best:12"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9}])
def test_a_loop_decodes_as_without_it(make, shape, params):
    """Every greedy tree is the head's own, however many chunks its text takes, in slots that were used before."""
    target, head, drafter = make(slots=3)
    proposer = Proposer(drafter, looks_up=False)
    loop, trees = HostLoop(target, proposer, 4, frozenset()), proposed_trees(proposer)
    chosen = SamplingParams(max_new_tokens=20, speculation=shape, seed=4, **params)
    for prompts in ([[5], [1, 2], [*range(12)] * 3], [[*range(12), 4, 9], [5, 5], [1, 2]]):
        for prompt, sequence in zip(prompts, run(loop, [sequence_of(each, chosen) for each in prompts]), strict=True):
            assert (sequence.error, sequence.output) == (None, plain_text(target.model, prompt, chosen))
    assert len(trees) > 30
    assert all(len(each.tokens) <= CHUNK for step in head.steps for each in step)
    for text, tree in trees if not params else ():
        assert tree == (wanted(head.model, text, shape) if len(text) > 1 else Tree(text)), text
