"""The executor in standard operators: transformers' logits, on a device that is a host's memory."""

import numpy as np
import pytest
from executor_contract import chain, check_levels, check_trees_and_commits
from host_device import HostDevice
from small_models import reference
from tiny_models import CAPACITY, CHUNK, VOCAB, executor, torch_model

from specbuild.runtime.errors import ExecutionError

BOUND = {"rtol": 1e-4, "atol": 1e-4}
PROMPTS = [[5, 17, 3, 88, 42, 9, 9, 61, 30, 2, 77], [61, 4, 4], [8]]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = tmp_path_factory.mktemp("standard")
    return lambda name, batch_size: executor(name, HostDevice(), folder, batch_size)


@pytest.mark.slow
def test_a_long_chunk_is_a_step_of_its_slot(make):
    made, texts = make("target", 3), [[(7 * i + k) % VOCAB for i in range(40)] for k in range(3)]
    done = [0, 5, 0]

    def check(shares):
        """Slots, how many tokens they read, and of how many the logits are wanted."""
        rows = made.step(
            [chain(s, texts[s][done[s] : done[s] + count], done[s], wanted) for s, count, wanted in shares]
        )
        for (slot, count, wanted), found in zip(shares, rows, strict=True):
            done[slot] += count
            expected = reference(torch_model("target"), texts[slot][: done[slot]])
            np.testing.assert_allclose(found, expected[done[slot] - wanted :], **BOUND)
            made.commit(slot, (), done[slot])

    made.step([chain(1, texts[1][:5], 0, 1)])
    made.commit(1, (), 5)
    check([(0, CHUNK, 1), (1, 4, 4), (2, 20, 0)])
    assert made.model.steps[-3:] == [CHUNK, 20, 4]
    check([(2, 20, 1), (0, 40 - CHUNK, 1)])


@pytest.mark.slow
def test_more_nodes_than_a_step_has_are_refused(make):
    with pytest.raises(ExecutionError, match="10000 nodes do not fit a step of the target"):
        make("target", 2).bucket(10_000)


@pytest.mark.slow
def test_seconds_are_those_that_the_device_takes_for_steps(make):
    """By its own clock: not what it does before a step, not copies, and not how long the host waits."""
    made, now = make("target", 2), [0.0]
    device = made.device
    device.clock = lambda: now[0]

    def passes(seconds):
        now[0] += seconds

    made.model.spoil = passes
    for prompt, took in ((PROMPTS[1], 4), ([7] * 20, 20), (PROMPTS[2], 1)):
        device.run(made.stream, lambda: passes(100.0))
        before = made.seconds
        made.step([chain(1, prompt, 0, 1)])
        assert made.seconds - before == took
    made.wait()
    made.erase(1)
    assert made.seconds == 25
    made.timed(lambda: device.run(made.stream, lambda: passes(3.0)))
    device.run(made.stream, lambda: passes(100.0))
    made.wait()
    assert made.seconds == 28


def test_a_slot_is_erased_alone(make):
    made = make("target", 3)
    cache = made.device.array(made.model.tensors.cache)
    assert not cache.any(), "its first runs left nothing"
    cache[:] = np.nan
    made.erase(1)
    assert not cache[:, 1].any()
    assert np.isnan(cache[:, [0, 2]]).all()


def test_positions_end_where_the_model_does(make):
    made = make("target", 1)
    object.__setattr__(made.spec, "max_positions", 4)
    made.step([chain(0, [1, 2, 3, 4, 5, 6], 0, 0)])
    assert made.device.array(made.model.tensors.positions).ravel()[:8].tolist() == [0, 1, 2, 3, 3, 3, 0, 0]


class Padded:
    """A model whose prompts have few lengths; it notes them."""

    lengths = (2, 18, 24)

    def __init__(self, inner):
        self.inner, self.noted = inner, list[tuple[int, int]]()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def prefill(self, slot, nodes, last, stream):
        assert nodes in self.lengths
        self.noted.append((nodes, last))
        self.inner.prefill(slot, nodes, last, stream)


@pytest.mark.parametrize(
    ("count", "start", "steps"),
    [
        (24, 0, [(24, 23)]),
        (17, 0, [(18, 16)]),  # padded
        (20, CAPACITY - 21, [(18, 17), (2, 1)]),  # whose padding's rows would not fit
        (18, CAPACITY - 18, [(18, 17)]),
    ],
)
def test_a_prompt_is_padded_to_a_length_that_the_model_has(make, count, start, steps):
    results = []
    for pads in (False, True):
        made = make("target", 2)
        for at in range(0, start, 8):
            made.step([chain(1, [3 + i % 40 for i in range(at, min(at + 8, start))], at, 0)])
            made.commit(1, (), min(at + 8, start))
        if pads:
            made.model = Padded(made.model)
        (rows,) = made.step([chain(1, [7 + i % 50 for i in range(count)], start, 1)])
        results.append(rows.copy())
    assert made.model.noted == steps
    np.testing.assert_allclose(results[1], results[0], **BOUND)
    with pytest.raises(ExecutionError, match="1 nodes from row 111 on do not fit the target's padding"):
        made.step([chain(1, [5] * 19, CAPACITY - 19, 0)])


@pytest.mark.nightly(but=("target",))
@pytest.mark.parametrize("name", ["target", "windowed"])
def test_steps_are_transformers(make, name):
    made, model = make(name, 3), torch_model(name)

    def last(text):
        rows = reference(model, list(text))
        return rows[-1]

    check_trees_and_commits(made, PROMPTS, last, BOUND)
    check_levels(made, 1, PROMPTS[0], last, BOUND)
