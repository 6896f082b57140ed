"""Exactness reports: equal tokens, near-ties and real divergences, told apart by the margin."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from specbuild.measure.exactness import compare
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.sampling.sampler import Sampler

PARAMS = SamplingParams(max_new_tokens=16, seed=3, speculation="topk:2,3")


@pytest.fixture(scope="module")
def engine(bundle):
    with Engine.load(bundle, batch_size=2, threads=1) as engine:
        yield engine


class FakeEngine:
    """Says what it is told, whatever the prompt."""

    def __init__(self, tokens, logits, exact=False):
        models = {"target": SimpleNamespace(vocab_size=len(logits))}
        self.manifest = SimpleNamespace(exactness_bound=1e-4, models=models)
        self.exact, self.tokens, self.asked, self._logits = exact, tokens, list[list[int]](), logits
        self.error: ExecutionError | None = None

    def generate(self, prompts, params):
        speculation = SimpleNamespace(num_accepted_draft_tokens=6, num_spec_steps=2)
        metrics = SimpleNamespace(speculative_decoding=speculation)
        return [SimpleNamespace(token_ids=self.tokens, metrics=metrics, error=self.error) for _ in prompts]

    def logits(self, tokens):
        self.asked.append(tokens)
        return np.array(self._logits, dtype=np.float32)


def compared(engine, expected, params=PARAMS, near_ties=False):
    return compare(engine, "fake", [[0, 3]], [params], [expected], near_ties)


@pytest.mark.parametrize(("gap", "real"), [(0.0, False), (0.00005, False), (0.001, True)])
@pytest.mark.parametrize(("want", "got"), [(1, 2), (2, 1)])
def test_the_gap_tells_a_near_tie_from_a_real_divergence(gap, real, want, got):
    """Whichever of the two the measured logits favour."""
    engine = FakeEngine([0, got, 0], [0.0, 1.0, 1.0 - gap, -1.0])
    case = compared(engine, [0, want, 3])
    (found,) = case.divergences
    assert (found.position, found.expected, found.got, found.real) == (1, want, got, real)
    assert found.margin == pytest.approx(gap, abs=1e-6)
    assert (case.exact, engine.asked, case.mean_acceptance_length) == (not real, [[0, 3, 0]], 4)


def test_a_request_that_fails_is_raised():
    engine = FakeEngine([1], [0.0] * 4)
    engine.error = ExecutionError("it failed")
    with pytest.raises(ExecutionError, match="it failed"):
        compared(engine, [1])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_where_steps_have_an_exactness_class_only_what_was_computed_elsewhere_has_near_ties(elsewhere):
    engine = FakeEngine([0, 2, 0], [0.0, 1.0, 1.0, -1.0], exact=True)
    assert compared(engine, [0, 1, 3], near_ties=elsewhere).exact is elsewhere


def test_the_margin_is_of_the_processed_and_perturbed_logits():
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
def test_a_text_that_ends_elsewhere_is_a_real_divergence(want, got):
    (found,) = compared(FakeEngine(got, [0.0] * 4), want).divergences
    assert found.real
    assert found.position == min(len(want), len(got))
    assert -1 in (found.expected, found.got)
