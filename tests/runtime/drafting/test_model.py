"""The model drafter: a draft that equals the target is accepted fully, and none changes a token."""

from itertools import pairwise

import numpy as np
import pytest
from device_requests import run
from hash_models import HashExecutor, HashModel, growths, plain_text, sequence_of

from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.tree import TreeSpec

PARAMS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.2},
    {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.2},
]


def loop_of(target, draft):
    proposer = Proposer(ModelDrafter(HashExecutor(draft), 8), looks_up=False)
    return HostLoop(HashExecutor(target), proposer, 8, frozenset())


@pytest.mark.parametrize(
    ("text", "params"), [("chain:4", 0), ("chain:4", 3), ("best:1", 1), ("topk:2,3", 2), ("best:16", 3)]
)
def test_a_draft_that_equals_the_target_is_accepted(text, params):
    model, spec = HashModel(5), TreeSpec.parse(text)
    loop = loop_of(model, model)
    sequence = sequence_of([1, 2, 3], SamplingParams(max_new_tokens=60, speculation=text, seed=4, **PARAMS[params]))
    while not sequence.finish_reason:
        before, drafted = len(sequence.output), sequence.drafts
        loop.round([sequence])
        if not sequence.finish_reason:
            emitted = len(sequence.output) - before
            assert emitted == 1 + spec.depth if drafted and spec.width == 1 else emitted >= 1 + drafted
    assert len(sequence.output) == 60
    loop.close()


class Ending(HashModel):
    """A draft that knows nothing to follow every third text."""

    def __call__(self, tokens):
        return super().__call__(tokens) - (np.inf if sum(tokens) % 3 == 0 else 0)


def test_a_draft_to_which_nothing_follows_changes_no_token():
    draft = Ending(6, error=0.4)
    loop = loop_of(HashModel(6), draft)
    sequence = sequence_of([1, 2, 3], SamplingParams(max_new_tokens=60, speculation="best:5"))
    run(loop, [sequence])
    assert (sequence.error, sequence.output) == (None, plain_text(HashModel(6), [1, 2, 3], sequence.params))
    loop.close()


@pytest.mark.parametrize(("text", "nodes"), [("chain:4", 5), ("topk:3,3", 8)])
def test_a_draft_runs_no_node_twice(text, nodes):
    """A round runs what was emitted and not run, the last leaf and the bonus at most, and its own inner nodes."""
    model = HashModel(5)
    executor = HashExecutor(model)
    loop, ran = HostLoop(HashExecutor(model), Proposer(ModelDrafter(executor, 8), looks_up=False), 8, frozenset()), [0]
    sequence = sequence_of([1, 2, 3], SamplingParams(max_new_tokens=60, speculation=text))
    while not sequence.finish_reason:
        loop.round([sequence])
        ran.append(sum(len(each.tokens) for step in executor.steps for each in step))
    assert all(after - before <= nodes for before, after in pairwise(ran[2:]))


def test_a_draft_catches_up_with_what_it_did_not_see():
    executor = HashExecutor(HashModel(5), 2)
    drafter = ModelDrafter(executor, 4)
    long, short = (
        sequence_of(prompt, SamplingParams(speculation="chain:3"), slot=slot)
        for slot, prompt in enumerate(([1] * 11, [2, 3]))
    )
    for _ in range(2):
        for sequence, growth in zip((long, short), growths(drafter, long, short), strict=True):
            tokens = list(sequence.tokens)
            while len(tokens) < len(sequence.tokens) + 3:
                tokens.append(int(HashModel(5)(tokens).argmax()))
            assert growth.tree().tokens == tokens[len(sequence.tokens) - 1 :]
            drafter.commit(sequence.slot, growth, [0])
        short.emit(7, frozenset())
        for token in range(9):  # eight of them without the draft
            long.emit(token, frozenset())
    drafter.release(0)
    drafter.keep(0, 1, 2)  # of [2, 3, …]
    other = sequence_of([2, 3, 6], SamplingParams(speculation="chain:3"), slot=0)
    executor.steps.clear()
    (growth,) = growths(drafter, other)
    assert growth.tree().tokens[1] == int(HashModel(5)([2, 3, 6]).argmax())
    assert executor.steps[0][0].start == 2
