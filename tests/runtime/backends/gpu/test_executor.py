"""The executor in standard operators: transformers' logits, on a device that is a host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from host_device import HostDevice
from small_models import branching, reference
from tiny_models import BUCKETS, CAPACITY, CHUNK, VOCAB, executor, torch_model

from specbuild.runtime.backends.executor import StepInput
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.speculation.tree import Tree

BOUND = {"rtol": 1e-4, "atol": 1e-4}
PROMPTS = [[5, 17, 3, 88, 42, 9, 9, 61, 30, 2, 77], [61, 4, 4], [8]]
Make = Callable[[str, int], StandardExecutor]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = tmp_path_factory.mktemp("standard")
    return lambda name, batch_size: executor(name, HostDevice(), folder, batch_size)


def chain(slot: int, tokens: Sequence[int], start: int, logits: int) -> StepInput:
    return StepInput(slot, start, start, tokens, range(start, start + len(tokens)), None, logits)


def grown(slot: int, tree: Tree, start: int) -> StepInput:
    return StepInput(slot, start, start, tree.tokens, [start + d for d in tree.depths], tree.ancestors(), len(tree))


@pytest.mark.slow(but=("target",))
@pytest.mark.parametrize("name", ["target", "windowed"])
def test_prompts_trees_and_commits_are_transformers(make: Make, name: str) -> None:
    model, made = torch_model(name), make(name, 3)
    shares = [chain(slot, prompt, 0, len(prompt)) for slot, prompt in enumerate(PROMPTS)]
    for rows, prompt in zip(made.step(shares[::-1])[::-1], PROMPTS, strict=True):
        np.testing.assert_allclose(rows, reference(model, prompt), **BOUND)
    texts = [list(prompt) for prompt in PROMPTS]
    for seed in range(2):  # the second round's trees lie over the first one's committed branch
        for slot, text in enumerate(texts):
            made.commit(slot, (), len(text))
        trees = [branching(10 * seed + slot, 9 - 2 * slot) for slot in range(2)]
        results = [rows.copy() for rows in made.step([grown(s, t, len(texts[s])) for s, t in enumerate(trees)])]
        for slot, (rows, tree) in enumerate(zip(results, trees, strict=True)):
            for node in range(len(tree)):
                expected = reference(model, [*texts[slot], tree.tokens[0], *tree.path(node)])[-1]
                np.testing.assert_allclose(rows[node], expected, **BOUND)
            path = np.flatnonzero(tree.ancestors()[-1]).tolist()
            made.commit(slot, [len(texts[slot]) + node for node in path], len(texts[slot]))
            texts[slot] += [tree.tokens[node] for node in path]
    (rows,) = made.step([chain(2, [3, 4], 1, 1)])  # the third slot has idled meanwhile
    np.testing.assert_allclose(rows, reference(model, [8, 3, 4])[-1:], **BOUND)


@pytest.mark.slow(but=("target",))
@pytest.mark.parametrize("name", ["target", "windowed"])
def test_levels_see_their_branch(make: Make, name: str) -> None:
    """As a draft runs them: rows that are there, but not committed, by the mask alone."""
    model, made, text = torch_model(name), make(name, 2), PROMPTS[0]
    made.step([chain(1, text, 0, 0)])
    made.commit(1, (), len(text))
    base = len(text)
    made.step([StepInput(1, base, base, [1, 2], [base] * 2, np.eye(2, dtype=np.bool_), 2)])
    sees = np.array([[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [1, 0, 0, 0, 1]], dtype=np.bool_)
    (rows,) = made.step([StepInput(1, base + 2, base, [3, 4, 5], [base + 1] * 3, sees, 3)])
    for row, path in zip(rows, ([1, 3], [2, 4], [1, 5]), strict=True):
        np.testing.assert_allclose(row, reference(model, [*text, *path])[-1], **BOUND)


def test_a_long_chunk_is_a_step_of_its_slot(make: Make) -> None:
    made, texts = make("target", 3), [[(7 * i + k) % VOCAB for i in range(40)] for k in range(3)]
    model = torch_model("target")
    made.step([chain(1, texts[1][:5], 0, 1)])
    made.commit(1, (), 5)
    first = made.step([chain(0, texts[0][:CHUNK], 0, 1), chain(1, texts[1][5:9], 5, 4), chain(2, texts[2][:20], 0, 0)])
    assert made.model.steps[-3:] == [CHUNK, 20, 4]
    assert [len(rows) for rows in first] == [1, 4, 0]
    np.testing.assert_allclose(first[0], reference(model, texts[0][:CHUNK])[-1:], **BOUND)
    np.testing.assert_allclose(first[1], reference(model, texts[1][:9])[5:], **BOUND)
    for slot, end in enumerate((CHUNK, 9, 20)):
        made.commit(slot, (), end)
    second = made.step([chain(2, texts[2][20:40], 20, 1), chain(0, texts[0][CHUNK:40], CHUNK, 1)])
    for rows, slot in zip(second, (2, 0), strict=True):
        np.testing.assert_allclose(rows, reference(model, texts[slot])[-1:], **BOUND)


def test_seconds_are_those_that_the_device_takes_for_steps(make: Make) -> None:
    """By its own clock: not what it does before a step, not copies, and not how long the host waits."""
    made, now = make("target", 2), [0.0]
    device: HostDevice = made.device  # type: ignore[assignment]
    device.clock = lambda: now[0]

    def passes(seconds: float) -> None:
        now[0] += seconds

    made.model.spoil = passes  # type: ignore[attr-defined]
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


def test_the_loop_measures_logits(make: Make) -> None:
    text = [(11 * i) % VOCAB for i in range(50)]
    expected = reference(torch_model("target"), text)
    loop = HostLoop(make("target", 2), None, CHUNK, frozenset())
    np.testing.assert_allclose(loop.logits(text), expected[-1:], **BOUND)
    for nodes in (1, 4, BUCKETS[-1]):
        np.testing.assert_allclose(loop.logits(text, 9, nodes), expected[-9:], **BOUND)


def test_a_slot_is_erased_alone(make: Make) -> None:
    made = make("target", 3)
    cache = made.device.array(made.model.cache)  # type: ignore[attr-defined]
    assert not cache.any(), "its first runs left nothing"
    cache[:] = np.nan
    made.erase(1)
    assert not cache[:, 1].any()
    assert np.isnan(cache[:, [0, 2]]).all()


def test_what_does_not_fit_is_refused(make: Make) -> None:
    made = make("target", 2)
    for share in (
        chain(0, [1] * (CHUNK + 1), 0, 1),
        chain(0, [1] * (BUCKETS[-1] + 1), 0, 2),
        chain(1, [1] * 4, CAPACITY - 3, 1),
    ):
        with pytest.raises(ExecutionError, match="do not fit the target"):
            made.step([share])


def test_positions_end_where_the_model_does(make: Make) -> None:
    made = make("target", 1)
    object.__setattr__(made.spec, "max_positions", 4)
    made.step([chain(0, [1, 2, 3, 4, 5, 6], 0, 0)])
    assert made.device.array(made.model.positions).ravel()[:8].tolist() == [0, 1, 2, 3, 3, 3, 0, 0]


class Padded:
    """A model whose prompts have few lengths; it notes them."""

    lengths = (2, 18, 24)

    def __init__(self, inner: object) -> None:
        self.inner, self.steps = inner, list[tuple[int, int]]()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def prefill(self, slot: int, nodes: int, last: int, stream: int) -> None:
        assert nodes in self.lengths
        self.steps.append((nodes, last))
        self.inner.prefill(slot, nodes, last, stream)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("count", "start", "steps"),
    [
        (24, 0, [(24, 23)]),
        (17, 0, [(18, 16)]),  # padded
        (20, CAPACITY - 21, [(18, 17), (2, 1)]),  # whose padding's rows would not fit
        (18, CAPACITY - 18, [(18, 17)]),
    ],
)
def test_a_prompt_is_padded_to_a_length_that_the_model_has(
    make: Make, count: int, start: int, steps: list[tuple[int, int]]
) -> None:
    made = make("target", 2)
    plain, prompt = made.model, [7 + i % 50 for i in range(count)]
    before = [3 + i % 40 for i in range(start)]
    results = []
    for model in (plain, Padded(plain)):
        made.model = model  # type: ignore[assignment]
        made.commit(1, (), 0)
        for at in range(0, start, 8):
            made.model = plain
            made.step([chain(1, before[at : at + 8], at, 0)])
            made.commit(1, (), min(at + 8, start))
        made.model = model  # type: ignore[assignment]
        (rows,) = made.step([chain(1, prompt, start, 1)])
        results.append(rows.copy())
    assert model.steps == steps  # type: ignore[union-attr]
    np.testing.assert_allclose(results[1], results[0], **BOUND)
    with pytest.raises(ExecutionError, match="1 nodes from row 111 on do not fit the target's padding"):
        made.step([chain(1, [5] * 19, CAPACITY - 19, 0)])
    made.model = plain
