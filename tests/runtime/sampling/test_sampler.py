"""Sampling: the parameters' limits, the noise, the distribution of choices, and each processor against a naive one."""

import math

import numpy as np
import pytest
from constraints import OneOf
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.errors import OptionError
from specbuild.runtime.sampling.sampler import Sampler, SamplingParams
from specbuild.runtime.sampling.structured import StructuredOutputs

VOCAB = 32
CHI_SQUARE = {32: 61.098, 8: 24.322}  # the 0.999 quantile of χ² over so many classes, from tables
DRAWS = 20_000
NAN, INF = math.nan, math.inf

NUMBERS = {
    "max_new_tokens": (1, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "top_k": (0, 2**31 - 1),
    "seed": (0, 2**64 - 1),
    "n": (1, 1024),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "priority": (-(2**31), 2**31 - 1),
    "min_tokens": (0, 128),  # as many as max_new_tokens
}
REALS = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-300, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "deadline": (1e-6, 1e9),
}
IDS = st.integers(0, 2**31 - 1)
RIGHT = {
    **{name: st.sampled_from(bounds) | st.integers(*bounds) for name, bounds in NUMBERS.items()},
    **{name: st.sampled_from(bounds) | st.floats(*bounds) for name, bounds in REALS.items()},
    **{name: st.booleans() for name in ("ignore_eos", "skip_special_tokens", "background")},
    **{name: st.none() | st.text("é\n", min_size=1, max_size=256) for name in ("session", "cache_salt")},
    "logit_bias": st.dictionaries(IDS, st.floats(-1e6, 1e6)),
    "stop": st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=8).map(tuple),
    "stop_token_ids": st.lists(IDS, max_size=64).map(tuple),
    "prediction": st.none() | st.text() | st.lists(IDS, max_size=64).map(tuple),
    "constraint": st.sampled_from([None, OneOf(((1,),), 2)]),
    "structured_outputs": st.sampled_from([None, StructuredOutputs(regex="a")]),
    "speculation": st.sampled_from(["auto", "off", "chain:4", "topk:2,3", "best:16"]),
}
NO_NUMBER = st.sampled_from([NAN, INF, -INF, True, "1", b"1", [1], 10**400, -(10**400)])
WRONG = {
    **{
        name: NO_NUMBER | st.floats() | st.integers(max_value=least - 1) | st.sampled_from([most + 1, 10 * most])
        for name, (least, most) in NUMBERS.items()
    },
    **{name: NO_NUMBER | st.floats(min_value=most, exclude_min=True) for name, (_, most) in REALS.items()},
    **{name: st.integers() | st.text() for name in ("ignore_eos", "skip_special_tokens", "background")},
    **{name: NO_NUMBER.filter(lambda wrong: wrong != "1") | st.just("") for name in ("session", "cache_salt")},
    "logit_bias": NO_NUMBER | st.sampled_from([{wrong: 1.0} for wrong in (-1, "x", "", None, 1.5, INF, NAN, True)]),
    "stop": st.sampled_from(["", [""], ["a", ""], 5, None, [1], ["a", None], {"a": 1}, b"a"]),
    "stop_token_ids": st.sampled_from([5, None, "7", [-1], [1.0], [True], ["7"], [2**31], [1] * 65, {7}]),
    "prediction": st.sampled_from([5, NAN, True, b"1", {}, [-1], [1.0], [True], ["7"], [None], [2**31]]),
    "constraint": st.sampled_from(["json", {"regex": "a"}, 3, object()]),
    "structured_outputs": st.sampled_from(["json", {}, {"regex": ""}, 3, object()]),
    "speculation": st.sampled_from(["", "on", "chain", "chain:0", "topk:2", "best:-1", None, 5, True, ["auto"]]),
}
WRONG["logit_bias"] |= NO_NUMBER.map(lambda wrong: {1: wrong})
for below in ("temperature", "min_p", "frequency_penalty", "presence_penalty"):
    WRONG[below] |= st.floats(max_value=REALS[below][0], exclude_max=True)
for positive in ("top_p", "repetition_penalty", "deadline"):
    WRONG[positive] |= st.floats(max_value=0)


@pytest.mark.parametrize("name", sorted(SamplingParams.names()))
@settings(max_examples=40)
@given(data=st.data())
def test_a_right_value_is_taken_and_a_wrong_one_refused_in_one_line_that_names_it(name, data):
    right, wrong = data.draw(RIGHT[name]), data.draw(WRONG[name])
    taken = getattr(SamplingParams(**{name: right}), name.replace("max_tokens", "max_new_tokens"))
    assert taken == right or (name == "temperature" and 0 < right < 0.01 and taken == 0)
    with pytest.raises(OptionError, match=name):
        SamplingParams(**{name: wrong})


def test_parameters_are_their_own():
    bias = {"1": 2.0}
    biased = SamplingParams(logit_bias=bias, stop="a")
    bias["1"] = 5.0
    assert (biased.logit_bias, biased.stop) == ({1: 2.0}, ("a",))


def logits_of(seed, size=VOCAB):
    return np.random.default_rng(seed).normal(0, 1, size).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("top_k", "bias", "follows"), [(0, 0.0, True), (8, 0.0, True), (0, 0.3, False)], ids=["all", "top_k", "biased"]
)
def test_choices_over_positions_follow_softmax(top_k, bias, follows):
    """Of what is left; the test would find a small bias."""
    logits, count = logits_of(1), top_k or VOCAB
    best = np.argsort(-logits)[:count]
    params = SamplingParams(temperature=1.0, top_k=top_k, logit_bias={int(best[0]): bias})
    sampler = Sampler(params, 11, [], VOCAB)
    drawn = np.bincount([sampler.choose(logits, position, ()) for position in range(DRAWS)], minlength=VOCAB)
    weights = np.exp(logits[best].astype(np.float64))
    expected = DRAWS * weights / weights.sum()
    assert drawn[best].sum() == DRAWS
    assert (((drawn[best] - expected) ** 2 / expected).sum() < CHI_SQUARE[count]) == follows


def scores_of(sampler, logits, position, path):
    """Every token's score as `ranked` gives it, −inf where it is left out."""
    scores = np.full(logits.shape, -np.inf, dtype=np.float32)
    ranked = list(sampler.ranked(logits, position, path))
    assert [score for _, score in ranked] == sorted((score for _, score in ranked), reverse=True)
    for token, score in ranked:
        scores[token] = score
    return scores


def test_repetition_penalty_is_transformers():
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), 0, [0, 1], 5)
    sampler.emit(2, 1)
    sampler.emit(2, 2)  # once or twice is the same
    logits = np.array([3, -3, 4, 5, -5], dtype=np.float32)
    assert scores_of(sampler, logits, 3, ()).tolist() == [1.5, -6, 2, 5, -5]
    assert scores_of(sampler, logits, 4, [3, 4]).tolist() == [1.5, -6, 2, 2.5, -10]
    assert not sampler.greedy


def test_frequency_and_presence_penalties_are_openais():
    """The prompt does not count, and a path leaves no trace."""
    sampler = Sampler(SamplingParams(frequency_penalty=0.5, presence_penalty=0.25), 0, [0, 0, 0], 4)
    logits = np.zeros(4, dtype=np.float32)
    assert scores_of(sampler, logits, 2, ()).tolist() == [0, 0, 0, 0]
    for position, token in enumerate((1, 2, 2), 3):
        sampler.emit(token, position)
    assert scores_of(sampler, logits, 7, [2, 3]).tolist() == [0, -0.75, -1.75, -0.75]
    assert scores_of(sampler, logits, 5, ()).tolist() == [0, -0.75, -1.25, 0]


@pytest.mark.parametrize(
    ("params", "other", "distance"),
    [
        ({"top_k": 2}, 2, 0.1),
        ({"min_p": 0.5}, 2, 1.1 - math.log(2)),
        ({"top_k": 2, "min_p": 0.5}, 3, 3 - math.log(2)),
        ({"top_p": 0.95}, 3, 0.02156),  # of probability mass
        ({"top_p": 0.95}, 2, 0.37875),  # which is what is left above the choice, where both are within
    ],
)
def test_margin_is_the_distance_to_the_cut_off_where_one_is_left_out(params, other, distance):
    logits = np.array([3.0, 2.0, 1.9, 0.0], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=1.0, **params), 0, [], 4)
    assert sampler.margin(logits, 0, (), other) == pytest.approx(distance, abs=1e-4)


def test_margin_sees_two_equals_on_both_sides_of_a_top_p_cut_off():
    """A rounding of 1e-6 swaps tokens 1 and 2, and with them who is left in: a near-tie, whatever mass they carry."""
    near, swapped = (np.log(np.array([0.4, 0.3, 0.3], dtype=np.float32)) for _ in range(2))
    near[1] += np.float32(1e-6)
    swapped[2] += np.float32(1e-6)
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.55), 0, [], 3)
    position = next(t for t in range(100) if sampler.choose(near, t, ()) == 1 and sampler.choose(swapped, t, ()) == 2)
    assert sampler.margin(near, position, (), 2) < 1e-4


@pytest.mark.slow
@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32), params=st.sampled_from([{}, {"top_k": 5}, {"min_p": 0.2}, {"top_k": 8, "min_p": 0.1}])
)
def test_less_than_the_margin_never_makes_the_other_the_choice(seed, params):
    logits, sampler = logits_of(seed), Sampler(SamplingParams(temperature=1.0, **params), seed, [], VOCAB)
    for other in range(VOCAB):
        margin = sampler.margin(logits, 1, (), other)
        assert margin >= 0
        if sampler.choose(logits, 1, ()) != other:
            shift = np.random.default_rng(seed).uniform(-margin / 4, margin / 4, VOCAB).astype(np.float32)
            assert sampler.choose(logits + shift, 1, ()) != other


@pytest.mark.parametrize(
    ("params", "broken", "together"),
    [
        ({"temperature": 0.7}, 0.0, True),
        ({}, 0.0, False),
        ({"temperature": 1.0, "top_p": 0.9}, 0.0, False),
        ({"temperature": 1.0, "repetition_penalty": 1.2}, 0.0, False),
        *[({"temperature": 1.0}, broken, False) for broken in (NAN, INF, -INF)],
    ],
)
def test_nodes_of_one_position_are_scored_together_where_they_do_not_differ(params, broken, together):
    rows, sampler = np.stack([logits_of(1), logits_of(2)]), Sampler(SamplingParams(**params), 4, [], VOCAB)
    rows[1, :] += np.float32(broken)
    found = sampler.scores(rows, 5)
    assert (found is not None) == together
    if found is not None:
        assert np.array_equal(found, [scores_of(sampler, row, 5, ()) for row in rows])
