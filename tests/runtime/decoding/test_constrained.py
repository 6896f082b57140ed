"""Constrained texts: plain decoding's tokens whatever is drafted, on trees, in batches; and the right distribution."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from constraints import OneOf, family, fits, loop_of, probabilities
from device_requests import run

from specbuild.runtime import SamplingParams
from specbuild.runtime.requests.sequence import Sequence

VOCAB, END = 12, 11
EOS = frozenset({END})


def requests(request_of: Any, seed: int, tree: str, temperature: float, count: int = 8) -> list[Sequence]:
    """Constrained by different families, with processors; every third is free."""
    found = []
    for index in range(count):
        more = [{}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.4, "logit_bias": {3: 1.0}}][index % 3]
        cut = {"top_p": 0.9, "top_k": 6} if temperature and index % 2 else {}
        constraint = None if index % 3 == 2 else family(seed + index, VOCAB, END)
        params = SamplingParams(
            max_new_tokens=20,
            temperature=temperature,
            seed=index,
            speculation=tree,
            constraint=constraint,
            **more | cut,
        )
        found.append(request_of([1, 2, 3 + index % 4], params))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["model", "both", "ahead", "lookup"])
@pytest.mark.parametrize("tree", ["chain:5", "topk:3,3", "best:12"])
def test_tokens_are_plain_decodings(
    hash_model: Any, hash_executor: Any, request_of: Any, plain: Any, tree: str, drafter: str, temperature: float
) -> None:
    """Four at once, constrained and free ones; each text is one that was allowed, or a beginning of one."""
    accepted = 0
    for seed in range(3):
        loop = loop_of(hash_model, hash_executor, seed, drafter)
        done = run(loop, requests(request_of, seed, tree, temperature))
        loop.close()
        for s in done:
            prompt = s.tokens[: len(s.tokens) - len(s.output)]
            assert s.error is None
            assert s.output == plain(hash_model(seed), prompt, s.params, EOS)
            if isinstance(constraint := s.params.constraint, OneOf):
                text = tuple(s.output)
                assert text[:-1] in constraint.texts or any(each[: len(text)] == text for each in constraint.texts)
            accepted += s.metrics.speculative_decoding.num_accepted_draft_tokens
    assert accepted > 0


@pytest.mark.soak(only=("best:8",))
@pytest.mark.slow
@pytest.mark.parametrize("tree", ["topk:2,3", "best:8"])
def test_the_distribution_is_the_model_s_among_what_is_allowed(
    hash_model: Any, hash_executor: Any, request_of: Any, tree: str
) -> None:
    """χ² against the enumeration of all texts, token by token among what is legal."""
    model = hash_model(4)
    constraint = OneOf(((0, 1, 2), (0, 1, 3), (0, 4), (5, 6, 7, 8), (5, 6, 9), (5, 2), (10, 10), (3,)), END)
    base, draws = SamplingParams(temperature=1.0, seed=0, max_new_tokens=9, constraint=constraint), 3000
    expected = probabilities(model, [7, 7], constraint, base)
    assert sum(expected.values()) == pytest.approx(1)
    loop = loop_of(hash_model, hash_executor, 4, "model")
    wanted = [request_of([7, 7], replace(base, seed=n, speculation=tree)) for n in range(draws)]
    seen = Counter(tuple(s.output) for s in run(loop, wanted))
    fits(seen, expected)
    assert sum(s.metrics.speculative_decoding.num_accepted_draft_tokens for s in wanted) > draws / 4


@pytest.mark.parametrize(
    ("drafter", "tree"), [("lookup", "off"), ("model", "best:8"), ("ahead", "best:8"), ("both", "chain:4")]
)
@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_constraint_that_raises_is_its_request_s_error(
    hash_model: Any, hash_executor: Any, request_of: Any, plain: Any, drafter: str, tree: str, after: int
) -> None:
    """Wherever it does, in the draft as well; what was emitted until then is right, and so is the other request."""

    class Broken(OneOf):
        def legal(self, text: Any) -> set[int]:
            if len(text) >= after:
                raise ValueError("no such rule")
            return super().legal(text)

    loop, good = loop_of(hash_model, hash_executor, 1, drafter), OneOf((tuple(range(11)), (3, 4, 5, 6)), END)
    params = [SamplingParams(9, constraint=each, speculation=tree) for each in (Broken(good.texts, END), good)]
    first, second = run(loop, [request_of([1, 2], each) for each in params])
    loop.close()
    assert "no such rule" in str(first.error)
    expected = plain(hash_model(1), [1, 2], params[1], EOS)
    assert first.output == expected[: len(first.output)]
    assert len(first.output) <= after
    assert (second.error, second.output) == (None, expected)


def test_where_nothing_is_allowed_the_request_ends_with_an_error(
    hash_model: Any, hash_executor: Any, request_of: Any
) -> None:
    class Nothing(OneOf):
        def legal(self, text: Any) -> set[int]:
            return set() if len(text) == 2 else super().legal(text)

    constraint = Nothing(((1, 2, 3, 4),), END)
    for temperature in (0.0, 1.0):
        params = SamplingParams(9, temperature, seed=1, speculation="chain:3", constraint=constraint)
        (done,) = run(loop_of(hash_model, hash_executor, 1, "model"), [request_of([1], params)])
        assert "no token that the constraint allows" in str(done.error)
        assert done.output == [1, 2]


def test_nobody_else_pays(
    hash_model: Any, hash_executor: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specbuild.runtime.sampling import sampler

    monkeypatch.setattr(sampler, "unpack", lambda *_: 1 / 0)
    loop = loop_of(hash_model, hash_executor, 1, "model")
    (free,) = run(loop, [request_of([1, 2], SamplingParams(max_new_tokens=9, speculation="best:4"))])
    assert free.error is None
    assert free.sampler.matcher is None
    assert free.sampler.greedy
