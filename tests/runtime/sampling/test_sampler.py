"""Sampling: the parameters' limits, the noise, the distribution of choices, and each processor against a naive one."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from constraints import OneOf
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from plain_sampler import gumbel

from specbuild.runtime.errors import OptionError
from specbuild.runtime.sampling.sampler import Sampler, SamplingParams, fresh_seed
from specbuild.runtime.sampling.structured import StructuredOutputs

VOCAB = 32
CHI_SQUARE_31 = 61.098  # the 0.999 quantile of χ² with 31 degrees of freedom, from tables
CHI_SQUARE_7 = 24.322  # with 7
DRAWS = 20_000
NAN, INF = math.nan, math.inf

BAD: dict[str, list[object]] = {
    "max_new_tokens": [0, -1, 1.0, 1.5, True, "8", None, NAN],
    "temperature": [-0.1, -1, -1e-9, 101, NAN, INF, -INF, True, "1", None, 10**400],
    "top_k": [-1, 1.5, True, "40", None, NAN],
    "top_p": [0, 0.0, -0.5, 1.01, 2, NAN, INF, True, "0.9", None, 10**400],
    "min_p": [-0.01, 1.01, NAN, INF, False, "0.1", None],
    "repetition_penalty": [0, -1, 101, NAN, INF, True, "1.1", None],
    "frequency_penalty": [-101, 101, NAN, INF, True, "0", None],
    "presence_penalty": [-101, 101, NAN, -INF, True, "0", None, -(10**400)],
    "logit_bias": [
        *(5, None, "5", [(1, 2.0)], {-1: 1.0}, {"x": 1.0}, {"": 1.0}, {None: 1.0}, {1: NAN}, {1: INF}, {1: True}),
        *({1: "2"}, {1: None}, {1: 1e7}, {1: 10**400}, {1.5: 1.0}, {INF: 1.0}, {NAN: 1.0}, {True: 1.0}),
    ],
    "seed": [-1, 2**64, 1.0, 0.5, True, "1", NAN],
    "stop": ["", [""], ["a", ""], 5, None, [1], ["a", None], {"a": 1}, b"a"],
    "stop_token_ids": [5, None, "7", [-1], [1.0], [True], ["7"], [2**31], [1] * 65, {7}],
    "max_tokens": [0, -1, 1.0, True, "8", NAN, 2**31],
    "ignore_eos": [1, 0, "true", None],
    "n": [0, -1, 1025, 1.0, True, "1", None, NAN],
    "logprobs": [-1, 21, 1.0, True, "1", NAN],
    "deadline": [0, -1, NAN, INF, True, "1", 10**400],
    "constraint": ["json", {"regex": "a"}, 3, object()],
    "structured_outputs": ["json", {}, {"regex": ""}, {"regex": "a", "choice": ["b"]}, 3, object()],
    "session": ["", "x" * 257, 5, True, b"a", ["a"], NAN],
    "cache_salt": ["", "x" * 257, 5, True, b"a", ["a"], NAN],
    "priority": [1.0, True, "1", None, NAN, 2**31, -(2**31) - 1],
    "min_tokens": [-1, 1.0, True, "1", None, NAN, 129],  # 129: more than max_new_tokens
    "skip_special_tokens": [1, 0, "true", None],
    "background": [1, 0, "true", None],
    "speculation": ["", "on", "chain", "chain:0", "topk:2", "best:-1", None, 5, True, ["auto"]],
}

GOOD: dict[str, list[object]] = {
    "max_new_tokens": [1, 10**9],
    "temperature": [0, 0.0, 0.01, 1, 100],
    "top_k": [0, 1, 10**9],
    "top_p": [1e-6, 0.5, 1, 1.0],
    "min_p": [0, 0.05, 1],
    "repetition_penalty": [0.5, 1, 2],
    "frequency_penalty": [-2, 0, 2.0],
    "presence_penalty": [-2, 0, 2.0],
    "logit_bias": [{}, {0: -100}, {31: 2.5}],
    "seed": [None, 0, 2**64 - 1],
    "stop": ["a", (), [], ["a", "b"], ("\n\n",)],
    "stop_token_ids": [(), [], [0], (5, 7), [2**31 - 1]],
    "max_tokens": [1, 64],
    "ignore_eos": [True, False],
    "n": [1, 2, 1024],
    "logprobs": [None, 0, 20],
    "deadline": [None, 1e-6, 1, 10**9],
    "structured_outputs": [None, StructuredOutputs(regex="a"), StructuredOutputs(json={"type": "object"})],
    "constraint": [None, OneOf(((1,),), 2)],
    "session": [None, "a", "é\n", "x" * 256],
    "cache_salt": [None, "a", "x" * 256],
    "priority": [0, -(2**31), 2**31 - 1],
    "min_tokens": [0, 1, 128],
    "skip_special_tokens": [True, False],
    "background": [True, False],
    "speculation": ["auto", "off", "chain:4", "topk:2,3", "best:16"],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(name, value, id=f"{name}-{value!r:.20}") for name, values in BAD.items() for value in values],
)
def test_a_bad_value_is_refused_in_one_line_that_names_it(name: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(name, value, id=f"{name}-{value!r:.20}") for name, values in GOOD.items() for value in values],
)
def test_a_good_value_is_taken(name: str, value: object) -> None:
    kept = getattr(SamplingParams(**{name: value}), name.replace("max_tokens", "max_new_tokens"))  # type: ignore[arg-type]
    assert kept == (
        value if name not in ("stop", "stop_token_ids") else (value,) if isinstance(value, str) else tuple(value)
    )  # type: ignore[arg-type]


def test_every_parameter_is_covered_here_and_named() -> None:
    assert set(BAD) == set(GOOD) == SamplingParams.names()


def test_parameters_are_frozen() -> None:
    params, bias = SamplingParams(), {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    biased = SamplingParams(logit_bias=bias)
    bias[1] = 5.0
    assert biased.logit_bias == {1: 2.0}


def test_token_ids_of_json_become_numbers() -> None:
    assert SamplingParams(logit_bias={"7": 1.5}).logit_bias == {7: 1.5}  # type: ignore[dict-item]


def test_a_bias_past_the_vocabulary_is_refused() -> None:
    Sampler(SamplingParams(logit_bias={VOCAB - 1: 1.0}), 0, [], VOCAB)
    with pytest.raises(OptionError, match="logit_bias"):
        Sampler(SamplingParams(logit_bias={VOCAB: 1.0}), 0, [], VOCAB)


def test_fresh_seeds_differ_and_survive_json() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**53 for seed in seeds)


def logits_of(seed: int, size: int = VOCAB) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 1, size).astype(np.float32)


def chi_square(tokens: Iterable[int], probabilities: NDArray[np.float64]) -> float:
    counts = Counter(tokens)
    assert all(probabilities[token] > 0 for token in counts)
    expected, total = DRAWS * probabilities, counts.total()
    assert total == DRAWS
    return float(sum((counts[x] - expected[x]) ** 2 / expected[x] for x in np.flatnonzero(expected)))


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def draws_over_positions(sampler: Sampler, logits: NDArray[np.float32]) -> list[int]:
    return [sampler.choose(logits, position, ()) for position in range(DRAWS)]


def test_choices_over_positions_follow_softmax() -> None:
    logits = logits_of(1)
    drawn = draws_over_positions(Sampler(SamplingParams(temperature=1.0), 11, [], VOCAB), logits)
    assert chi_square(drawn, softmax(logits)) < CHI_SQUARE_31


def test_choices_over_seeds_follow_softmax() -> None:
    logits, params = logits_of(2), SamplingParams(temperature=0.8)
    drawn = [Sampler(params, seed, [], VOCAB).choose(logits, 5, ()) for seed in range(DRAWS)]
    assert chi_square(drawn, softmax(logits / np.float32(0.8))) < CHI_SQUARE_31


def test_choices_under_top_k_follow_what_is_left() -> None:
    logits = logits_of(3)
    left = np.where(np.isin(np.arange(VOCAB), np.argsort(-logits)[:8]), logits, np.float32(-np.inf))
    drawn = draws_over_positions(Sampler(SamplingParams(temperature=1.0, top_k=8), 5, [], VOCAB), logits)
    assert chi_square(drawn, softmax(left)) < CHI_SQUARE_7


@pytest.mark.parametrize("token", [0, 1, 2])
def test_a_biased_sampler_fails_the_same_test(token: int) -> None:
    logits = logits_of(1)
    by_rank = int(np.argsort(-logits)[token])
    params = SamplingParams(temperature=1.0, logit_bias={by_rank: 0.3})
    drawn = draws_over_positions(Sampler(params, 11, [], VOCAB), logits)
    assert chi_square(drawn, softmax(logits)) > CHI_SQUARE_31


def scores_of(sampler: Sampler, logits: NDArray[np.float32], position: int, path: Sequence[int]) -> NDArray[np.float32]:
    """Every token's score as `ranked` gives it, −inf where it is left out."""
    scores = np.full(logits.shape, -np.inf, dtype=np.float32)
    ranked = list(sampler.ranked(logits, position, path))
    assert [score for _, score in ranked] == sorted((score for _, score in ranked), reverse=True)
    for token, score in ranked:
        scores[token] = score
    return scores


def naive_kept(logits: NDArray[np.float32], top_k: int, top_p: float, min_p: float) -> tuple[list[bool], list[bool]]:
    """Who stays, and who is too near a cut-off for float32 to tell."""
    values = [float(value) for value in logits]
    order = sorted(range(len(values)), key=lambda x: (-values[x], x))
    kept, near = [True] * len(values), [False] * len(values)
    if 0 < top_k < len(values):
        kept = [value >= values[order[top_k - 1]] for value in values]
    weights = [math.exp(value - values[order[0]]) * keep for value, keep in zip(values, kept, strict=True)]
    for token in order if top_p < 1 else ():
        above = math.fsum(w for w, value in zip(weights, values, strict=True) if value > values[token])
        near[token] = abs(above / math.fsum(weights) - top_p) < 1e-6
        kept[token] = kept[token] and above / math.fsum(weights) < top_p
    for token in order if min_p > 0 else ():
        distance = values[token] - values[order[0]] - math.log(min_p)
        near[token] = near[token] or abs(distance) < 1e-4
        kept[token] = kept[token] and distance >= 0
    return kept, near


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    ties=st.booleans(),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1)),
)
def test_cut_offs_against_a_naive_float64_reference(
    seed: int, ties: bool, top_k: int, top_p: float, min_p: float
) -> None:
    logits = 2 * logits_of(seed)
    if ties:
        logits = np.round(logits)
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    sampler = Sampler(params, seed, [], VOCAB)
    kept, near = naive_kept(logits, top_k, top_p, min_p)
    scores = scores_of(sampler, logits, 3, ())
    assert scores[np.argmax(logits)] > -np.inf  # something is always left
    for token in range(VOCAB):
        if not near[token]:
            assert bool(np.isfinite(scores[token])) == kept[token]
    left = np.isfinite(scores)
    assert np.array_equal(scores[left], (logits + gumbel(seed, 3, VOCAB))[left])


def test_cut_offs_leave_the_best_token_at_their_tightest() -> None:
    logits = logits_of(4)
    for params in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        sampler = Sampler(SamplingParams(temperature=1.0, **params), 0, [], VOCAB)  # type: ignore[arg-type]
        assert {sampler.choose(logits, position, ()) for position in range(50)} == {int(logits.argmax())}


def test_cut_offs_do_nothing_at_temperature_0() -> None:
    logits = logits_of(5)
    sampler = Sampler(SamplingParams(top_k=3, top_p=0.5, min_p=0.5, seed=1), 1, [], VOCAB)
    assert sampler.greedy
    assert np.array_equal(scores_of(sampler, logits, 0, ()), logits)


def test_greedy_takes_the_lowest_token_among_equals() -> None:
    assert Sampler(SamplingParams(), 0, [], 4).choose(np.array([0, 2, 2, 1], dtype=np.float32), 0, ()) == 1


def test_repetition_penalty_is_transformers() -> None:
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), 0, [0, 1], 5)
    sampler.emit(2, 1)
    sampler.emit(2, 2)  # once or twice is the same
    logits = np.array([3, -3, 4, 5, -5], dtype=np.float32)
    assert scores_of(sampler, logits, 3, ()).tolist() == [1.5, -6, 2, 5, -5]
    assert scores_of(sampler, logits, 4, [3, 4]).tolist() == [1.5, -6, 2, 2.5, -10]
    assert not sampler.greedy


def test_frequency_and_presence_penalties_are_openais() -> None:
    sampler = Sampler(SamplingParams(frequency_penalty=0.5, presence_penalty=0.25), 0, [0, 0, 0], 4)
    logits = np.zeros(4, dtype=np.float32)
    assert scores_of(sampler, logits, 2, ()).tolist() == [0, 0, 0, 0]  # the prompt does not count
    sampler.emit(1, 3)
    sampler.emit(2, 4)
    sampler.emit(2, 5)
    assert scores_of(sampler, logits, 5, ()).tolist() == [0, -0.75, -1.25, 0]
    assert scores_of(sampler, logits, 7, [2, 3]).tolist() == [0, -0.75, -1.75, -0.75]
    assert scores_of(sampler, logits, 5, ()).tolist() == [0, -0.75, -1.25, 0]  # a path leaves no trace


def test_processors_come_in_the_order_of_the_design() -> None:
    params = SamplingParams(
        temperature=0.5, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.5, logit_bias={0: 3.0}
    )
    sampler = Sampler(params, 9, [0], 3)
    sampler.emit(0, 1)
    logits = np.array([4, 1, -1], dtype=np.float32)
    expected = np.array([(4 / 2 - 0.5 - 0.5 + 3) / 0.5, 2, -2], dtype=np.float32) + gumbel(9, 1, 3)
    np.testing.assert_allclose(scores_of(sampler, logits, 1, ()), expected, rtol=1e-6)
    assert logits.tolist() == [4, 1, -1]  # the caller's logits are as they were


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    path=st.lists(st.integers(0, VOCAB - 1), max_size=6),
)
def test_path_tokens_count_like_emitted_ones(seed: int, prompt: list[int], output: list[int], path: list[int]) -> None:
    params = SamplingParams(
        temperature=0.9, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3
    )
    drafted, emitted = (Sampler(params, seed, prompt, VOCAB) for _ in range(2))
    for sampler, tokens in ((drafted, output), (emitted, output + path)):
        for offset, token in enumerate(tokens):
            sampler.emit(token, len(prompt) + offset)
    logits, position = 2 * logits_of(seed), len(prompt) + len(output) + len(path)
    assert np.array_equal(scores_of(drafted, logits, position, path), scores_of(emitted, logits, position, ()))


def test_ranking_ends_after_as_many_misses_as_it_is_told() -> None:
    logits, params = np.log(np.array([0.9, 0.04, 0.03, 0.03], dtype=np.float32)), {"temperature": 1.0, "top_p": 0.5}
    sampler = Sampler(SamplingParams(**params), 0, [], 4)  # type: ignore[arg-type]
    for position in range(200):
        before = int(np.argsort(-(logits + gumbel(0, position, 4))).tolist().index(0))  # tokens top-p leaves out
        assert [token for token, _ in sampler.ranked(logits, position, ())] == [0]
        for misses in range(4):
            found = [token for token, _ in sampler.ranked(logits, position, (), misses)]
            assert found == ([0] if misses >= before else [])


def test_noise_is_one_for_a_position_and_forgotten_once_passed() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0), 2, [], VOCAB)
    first, later = sampler.noise(4), sampler.noise(6)
    assert sampler.noise(4) is first
    sampler.emit(1, 6)
    assert sampler.noise(6) is later
    assert sampler.noise(4) is not first
    assert np.array_equal(sampler.noise(4).all, first.all)


def test_margin_is_the_gap_where_both_are_left_in() -> None:
    logits = np.array([1.0, 3.0, 2.5], dtype=np.float32)
    greedy = Sampler(SamplingParams(), 0, [], 3)
    assert greedy.margin(logits, 0, (), 2) == pytest.approx(0.5)
    assert greedy.margin(logits, 0, (), 1) == 0
    sampler = Sampler(SamplingParams(temperature=1.0), 6, [], 3)
    scores = logits + gumbel(6, 2, 3)
    chosen, other = int(scores.argmax()), int(scores.argmin())
    assert sampler.margin(logits, 2, (), other) == pytest.approx(float(scores[chosen] - scores[other]))


@pytest.mark.parametrize(
    ("params", "other", "distance"),
    [
        ({"top_k": 2}, 2, 0.1),
        ({"top_k": 2}, 3, 2.0),
        ({"min_p": 0.5}, 2, 1.1 - math.log(2)),
        ({"top_k": 2, "min_p": 0.5}, 3, 3 - math.log(2)),
    ],
)
def test_margin_is_the_distance_to_the_cut_off_where_one_is_left_out(
    params: dict[str, float], other: int, distance: float
) -> None:
    logits = np.array([3.0, 2.0, 1.9, 0.0], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=1.0, **params), 0, [], 4)  # type: ignore[arg-type]
    assert sampler.margin(logits, 0, (), other) == pytest.approx(distance, abs=1e-5)


def test_margin_is_probability_mass_at_a_top_p_cut_off() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.79), 0, [], 4)
    assert sampler.margin(logits, 0, (), 2) == pytest.approx(0.01, abs=1e-5)
    assert sampler.margin(logits, 0, (), 3) == pytest.approx(0.16, abs=1e-5)


def test_margin_sees_how_near_the_chosen_one_was_to_its_cut_off() -> None:
    logits = np.array([2.0, 1.0001, 1.0], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=1.0, top_k=2), 0, [], 3)
    position = next(t for t in range(100) if sampler.choose(logits, t, ()) == 1)
    assert sampler.margin(logits, position, (), 0) == pytest.approx(1e-4, abs=1e-5)


def test_margin_sees_two_equals_on_both_sides_of_a_top_p_cut_off() -> None:
    """A rounding of 1e-6 swaps tokens 1 and 2, and with them who is left in: a near-tie, whatever mass they carry."""
    near, swapped = (np.log(np.array([0.4, 0.3, 0.3], dtype=np.float32)) for _ in range(2))
    near[1] += np.float32(1e-6)
    swapped[2] += np.float32(1e-6)
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.55), 0, [], 3)
    position = next(t for t in range(100) if sampler.choose(near, t, ()) == 1 and sampler.choose(swapped, t, ()) == 2)
    assert sampler.margin(near, position, (), 2) < 1e-4


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    params=st.sampled_from([{}, {"top_k": 5}, {"min_p": 0.2}, {"top_k": 8, "min_p": 0.1}]),
    other=st.integers(0, VOCAB - 1),
)
def test_less_than_the_margin_never_makes_the_other_the_choice(seed: int, params: dict[str, float], other: int) -> None:
    logits = logits_of(seed)
    sampler = Sampler(SamplingParams(temperature=1.0, **params), seed, [], VOCAB)  # type: ignore[arg-type]
    margin = sampler.margin(logits, 1, (), other)
    assert margin >= 0
    if sampler.choose(logits, 1, ()) != other:
        shift = np.random.default_rng(seed).uniform(-margin / 4, margin / 4, VOCAB).astype(np.float32)
        assert sampler.choose(logits + shift, 1, ()) != other


@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    params=st.sampled_from(
        [
            {},
            {"temperature": 1.0},
            {"temperature": 0.5, "top_k": 5},
            {"temperature": 1.3, "top_p": 0.8},
            {"temperature": 1.0, "top_k": 8, "min_p": 0.1, "top_p": 0.9},
            {"repetition_penalty": 1.8},
            {"temperature": 0.7, "repetition_penalty": 0.6, "logit_bias": {3: 2.0}},
        ]
    ),
    bound=st.floats(0, 2),
)
def test_a_settled_choice_stays_it_wherever_logits_lie_within_the_bound(
    seed: int, params: dict[str, Any], bound: float
) -> None:
    """Each moves by up to half of it: at random, and the choice alone down while all others go up."""
    logits, random = logits_of(seed), np.random.default_rng(seed)
    sampler = Sampler(SamplingParams(**params), seed, [1, 2, 3], VOCAB)
    token = sampler.choose(logits, 1, ())
    if not sampler.settles(logits, 1, token, bound):
        return
    worst = np.where(np.arange(VOCAB) == token, -0.5, 0.5)
    for moved in (worst, -worst, *(random.uniform(-0.5, 0.5, VOCAB) for _ in range(4))):
        assert sampler.choose((logits + 0.999 * bound * moved).astype(np.float32), 1, ()) == token


def test_a_choice_is_settled_where_nothing_comes_near_and_never_where_something_does() -> None:
    logits = np.array([0.0, 1.0, 3.0, -1.0], dtype=np.float32)
    greedy, cold = Sampler(SamplingParams(), 0, [], 4), Sampler(SamplingParams(temperature=0.5), 0, [], 4)
    assert [greedy.settles(logits, 0, 2, bound) for bound in (0.0, 1.9, 2.1)] == [True, True, False]
    position = next(t for t in range(50) if cold.choose(logits, t, ()) == 2)
    gap = cold.margin(logits, position, (), max({0, 1, 3}, key=lambda x: logits[x] * 2 + cold.noise(position).all[x]))
    assert [cold.settles(logits, position, 2, share * gap / 2) for share in (0.9, 1.1)] == [True, False]


def test_nodes_of_one_position_are_scored_together_as_one_by_one() -> None:
    rows = np.stack([logits_of(seed) for seed in range(3)])
    sampler = Sampler(SamplingParams(temperature=0.7), 4, [], VOCAB)
    together = sampler.scores(rows, 5)
    assert together is not None
    for row, scores in zip(rows, together, strict=True):
        assert np.array_equal(scores, scores_of(sampler, row, 5, ()))


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "repetition_penalty": 1.2}], ids=str
)
def test_nodes_whose_processors_differ_are_not_scored_together(params: dict[str, Any]) -> None:
    assert Sampler(SamplingParams(**params), 4, [], VOCAB).scores(logits_of(1)[None], 5) is None


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_nodes_without_a_best_token_are_not_scored_together(broken: float) -> None:
    rows = np.stack([logits_of(1), logits_of(2)])
    rows[1, :] = broken
    assert Sampler(SamplingParams(temperature=1.0), 4, [], VOCAB).scores(rows, 5) is None
