"""Exactness reports: equal tokens, near-ties and real divergences, told apart by the margin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specbuild.measure.exactness import Case, compare, in_words, plain
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.sampling.sampler import Sampler

PROMPTS = [[5, 900, 17], [33, 2048]]
PARAMS = SamplingParams(max_new_tokens=16, seed=3, speculation="topk:2,3")


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with Engine.load(bundle, batch_size=2, threads=1) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_compared_with_plain_decoding_is_exact(engine: Engine, temperature: float) -> None:
    params = replace(PARAMS, temperature=temperature, ignore_eos=True)
    expected = plain(engine, PROMPTS, [params, params])
    assert [len(tokens) for tokens in expected] == [16, 16]
    case = compare(engine, "tree", PROMPTS, [params, params], expected)
    assert (case.name, case.prompts, case.tokens) == ("tree", 2, 32)
    assert case.exact
    assert case.divergences == []
    assert case.mean_acceptance_length > 1
    assert case.to_dict()["exact"] is True


def test_a_changed_token_is_a_real_divergence(engine: Engine) -> None:
    expected = plain(engine, PROMPTS, [PARAMS, PARAMS])
    right = expected[1][4]
    expected[1][4] = wrong = (right + 1) % 4096
    (found,) = compare(engine, "wrong", PROMPTS, [PARAMS, PARAMS], expected).divergences
    assert (found.prompt, found.position, found.expected, found.got) == (1, 4, wrong, right)
    logits = engine.logits([*PROMPTS[1], *expected[1][:4]])
    assert found.margin == pytest.approx(float(logits[right] - logits[wrong]), abs=1e-3)
    assert found.real


def test_each_prompt_is_decoded_with_its_own_parameters(engine: Engine) -> None:
    each = [replace(PARAMS, temperature=1.0, seed=1), replace(PARAMS, max_new_tokens=5)]
    expected = plain(engine, PROMPTS, each)
    assert len(expected[1]) == 5
    assert expected == [plain(engine, [p], [e])[0] for p, e in zip(PROMPTS, each, strict=True)]
    assert compare(engine, "each", PROMPTS, each, expected).divergences == []


class FakeEngine:
    """Says what it is told, whatever the prompt."""

    def __init__(
        self, tokens: Sequence[int], logits: Sequence[float], bound: float = 1e-4, exact: bool = False
    ) -> None:
        self.exact = exact
        models = {"target": SimpleNamespace(vocab_size=len(logits))}
        self.manifest = SimpleNamespace(exactness_bound=bound, models=models)
        self.tokens, self.asked, self._logits = list(tokens), list[list[int]](), logits

    def generate(self, prompts: Any, params: Sequence[SamplingParams]) -> list[Any]:
        speculation = SimpleNamespace(num_accepted_draft_tokens=6, num_spec_steps=2)
        metrics = SimpleNamespace(speculative_decoding=speculation)
        return [SimpleNamespace(token_ids=self.tokens, metrics=metrics, error=None) for _ in prompts]

    def logits(self, tokens: list[int]) -> Any:
        self.asked.append(tokens)
        return np.array(self._logits, dtype=np.float32)


def compared(engine: FakeEngine, expected: list[int], params: SamplingParams = PARAMS) -> Case:
    return compare(engine, "fake", [[0, 3]], [params], [expected])  # type: ignore[arg-type]


@pytest.mark.parametrize(("gap", "real"), [(0.0, False), (0.00005, False), (0.001, True), (1.0, True)])
def test_the_gap_tells_a_near_tie_from_a_real_divergence(gap: float, real: bool) -> None:
    for want, got in ((1, 2), (2, 1)):  # whichever of the two the measured logits favour
        engine = FakeEngine([0, got, 0], [0.0, 1.0, 1.0 - gap, -1.0])
        case = compared(engine, [0, want, 3])
        (found,) = case.divergences
        assert (found.position, found.expected, found.got, found.real) == (1, want, got, real)
        assert found.margin == pytest.approx(gap, abs=1e-6)
        assert case.exact is not real
        assert engine.asked == [[0, 3, 0]]
        assert case.mean_acceptance_length == 4


def test_where_steps_have_an_exactness_class_no_difference_is_a_near_tie() -> None:
    engine = FakeEngine([0, 2, 0], [0.0, 1.0, 1.0, -1.0], exact=True)
    assert not compared(engine, [0, 1, 3]).exact
    case = compare(engine, "elsewhere", [[0, 3]], [PARAMS], [[0, 1, 3]], near_ties=True)  # type: ignore[arg-type]
    assert case.exact, "the expected tokens were computed elsewhere"


def test_classes_in_words() -> None:
    machine = {"processor": "X", "threads": 2, "onnxruntime": "1.32.0", "vector_units": "avx2"}
    records = [{"machine": machine, "rows": 1, "sequence_rows": 2}, {"machine": machine, "rows": 0, "sequence_rows": 0}]
    first, second, bound = in_words(records, 0.25)
    where = "(X, 2 threads, ONNX Runtime 1.32.0)"
    shapes = "steps of 1·n rows, 2·n of each sequence, agree in every bit"
    assert first == f"one seed gives one text, whatever is drafted, because {shapes} {where}"
    assert (
        second == f"one seed may give another text at near-ties, because steps of no shape agree in every bit {where}"
    )
    assert bound == "a choice in a side branch that is closer than 0.25 logits is left to the next round"


def test_the_margin_is_of_the_processed_and_perturbed_logits() -> None:
    params = SamplingParams(temperature=0.5, repetition_penalty=1.5, frequency_penalty=0.3, seed=8)
    logits = [0.5, 1.0, 0.9, -1.0]
    sampler = Sampler(params, 8, [0, 3], 4)
    sampler.emit(1, 2)
    scores = dict(sampler.ranked(np.array(logits, dtype=np.float32), 2, ()))
    best, *others = scores
    for other in others:
        (found,) = compared(FakeEngine([1, other], logits), [1, best], params).divergences
        assert found.margin == pytest.approx(scores[best] - scores[other], abs=1e-6)


@pytest.mark.parametrize(("want", "got"), [([1, 2], [1]), ([1], [1, 2]), ([], [1])])
def test_a_text_that_ends_elsewhere_is_a_real_divergence(want: list[int], got: list[int]) -> None:
    (found,) = compared(FakeEngine(got, [0.0] * 4), want).divergences
    assert found.real
    assert found.position == min(len(want), len(got))
    assert -1 in (found.expected, found.got)


def test_equal_tokens_ask_for_no_logits() -> None:
    engine = FakeEngine([1, 2, 3], [0.0] * 4)
    assert compared(engine, [1, 2, 3]).divergences == []
    assert engine.asked == []
