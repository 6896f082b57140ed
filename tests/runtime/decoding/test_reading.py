"""Texts read in chunks of any size give what they give when they are read at once."""

import numpy as np
import pytest
from hash_models import HashExecutor, HashModel, sequence_of
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.decoding.emission import Emission
from specbuild.runtime.decoding.reading import Reader, fair
from specbuild.runtime.sampling.sampler import SamplingParams

VOCAB = 12
OFF = SamplingParams(max_new_tokens=6, speculation="off")
TEXT = [(7 * i + i * i) % VOCAB for i in range(40)]


def reader_of(executor, chunk, lone_chunk=None):
    return Reader(executor, Emission(frozenset()), chunk, lone_chunk)


def read(reader, sequences):
    """Until each has its first token."""
    while waiting := [s for s in sequences if not s.output and not s.finish_reason]:
        before = [s.cached for s in waiting]
        reader.run(waiting)
        assert all(s.cached > was for s, was in zip(waiting, before, strict=True))


def sizes(executor):
    """By step, how many tokens of how many logits each input has."""
    assert all(each.committed == each.start for step in executor.steps for each in step), "committed before the next"
    return [[(len(each.tokens), each.logits) for each in step] for step in executor.steps]


@pytest.mark.parametrize(
    ("lone_chunk", "steps"), [(None, [4, 4, 4, 1]), (6, [6, 6, 1]), (64, [13]), (2, [2, 2, 2, 2, 2, 2, 1])]
)
def test_a_text_alone_is_read_in_longer_chunks(lone_chunk, steps):
    """Logits are wanted after the last one only; who is left alone is read in long ones from then on."""
    executor = HashExecutor(HashModel())
    read(reader_of(executor, 4, lone_chunk), [sequence_of(TEXT[:13], OFF)])
    assert sizes(executor) == [[(size, 0)] for size in steps[:-1]] + [[(steps[-1], 1)]]
    executor = HashExecutor(HashModel(), 3)
    read(reader_of(executor, 4, 16), [sequence_of(TEXT[:n], OFF, slot=slot) for slot, n in enumerate((6, 30, 1))])
    assert sizes(executor) == [[(4, 0), (4, 0), (1, 1)], [(2, 1), (4, 0)], [(16, 0)], [(6, 1)]]


class Reusing(HashExecutor):
    """Overwrites a step's logits in the next one, as executors of models do."""

    kept = np.zeros((64, VOCAB), dtype=np.float32)

    def step(self, inputs):
        (rows,) = super().step(inputs)
        self.kept.fill(np.nan)
        self.kept[: len(rows)] = rows
        return [self.kept[: len(rows)]]


@given(st.integers(1, 40), st.integers(1, 64))
def test_logits_are_the_models(count, size):
    """After each of the last tokens, whatever the steps; none of them is longer than asked."""
    model = HashModel(2)
    executor = Reusing(model, 1, 64, 64)
    found = reader_of(executor, size).logits(TEXT, count, size)
    assert (found.shape, found.dtype) == ((count, VOCAB), np.float32)
    assert found.tolist() == [model(TEXT[:end]).tolist() for end in range(41 - count, 41)]
    assert [length for ((length, _),) in sizes(executor)] == [size] * (40 // size) + [40 % size] * (40 % size > 0)
    assert sum(wanted for ((_, wanted),) in sizes(executor)) == count, "no row is computed that nobody wants"


@settings(max_examples=200)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=16), st.integers(0, 600))
def test_prompts_share_a_step_fairly(wanted, rows):
    """No more than there is, but one of each; nobody has more than it wants, nor than another that wants as much."""
    given_each = fair(wanted, rows)
    assert all(1 <= given <= want for given, want in zip(given_each, wanted, strict=True))
    assert sum(given_each) <= max(rows, len(wanted))
    least = min((given for given, want in zip(given_each, wanted, strict=True) if given < want), default=None)
    if least is not None:
        assert max(given_each) <= least + 1
        assert sum(given_each) > rows - len(wanted)
