"""The ranking against the plain one, bit for bit: tokens, scores and their order, whatever is on."""

import itertools
import math
from itertools import islice

import numpy as np
import pytest
from constraints import OneOf
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_sampler import PlainSampler

from specbuild.runtime.sampling.sampler import Sampler, SamplingParams

VOCABS = [1, 3, 61, 4096, 9001, 49152]  # the last two are past SMALL, one of them no multiple of a block
CUTS = [
    *({}, {}, {"top_k": 1}, {"top_k": 50}, {"top_k": 3000}, {"top_p": 0.95}, {"top_p": 1e-9}, {"top_p": 0.9999999}),
    *({"min_p": 0.05}, {"min_p": 1e-6}, {"min_p": 1.0}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}),
]
PROCESSORS = [
    *({}, {}, {}, {"repetition_penalty": 1.3}, {"repetition_penalty": 0.6, "presence_penalty": -0.7}),
    *({"frequency_penalty": 0.4}, {"logit_bias": {0: 1e6}}, {"logit_bias": {0: -1e6}, "repetition_penalty": 2.0}),
]
TEMPERATURES = [0.0, 0.01, 0.3, 0.8, 1.0, 1.3, 100.0]


def row_of(random, vocab):
    """Peaked, flat, tied, huge, tiny and partly absent logits."""
    row = random.normal(0, random.choice([0, 1e-30, 0.1, 1, 3, 8, 100, 1e30]), vocab).astype(np.float32)
    kind = random.integers(6)
    if kind == 0:
        row = np.round(row)
    elif kind == 1:
        row[random.random(vocab) < random.choice([0.1, 0.9, 0.9999, 1])] = -np.inf
    elif kind == 2:
        row[random.integers(vocab)] += np.float32(random.choice([1, 10, 1e3]))
    elif kind == 3:  # neighbours that a division by the temperature makes equal
        row = np.float32(7) + random.integers(-3, 4, vocab).astype(np.float32) * np.float32(2**-21)
    return row


def params_of(random):
    given = CUTS[random.integers(len(CUTS))] | PROCESSORS[random.integers(len(PROCESSORS))]
    return SamplingParams(temperature=float(random.choice(TEMPERATURES)), **given)


def compare(random, vocab, more=None):
    """One row, chosen from, ranked for a draft and settled, by both; how many rows were compared."""
    params, seed, position = params_of(random), int(random.integers(2**63)), int(random.integers(5000))
    if more:
        params = SamplingParams(**{name: getattr(params, name) for name in ("temperature", "top_k", "top_p")} | more)
    prompt = random.integers(0, vocab, 5).tolist()
    new, plain = (made(params, seed, prompt, vocab) for made in (Sampler, PlainSampler))
    for token in random.integers(0, vocab, 3).tolist() if not more else ():
        new.emit(token, 0)
        plain.emit(token, 0)
    rows = [row_of(random, vocab) for _ in range(random.integers(1, 3))]
    count, path = int(random.integers(1, 5)), random.integers(0, vocab, random.integers(3)).tolist() if not more else []
    for draft in rows[1:]:  # sometimes the noise was asked for before
        found = islice(new.drafted(draft, position, path, 4, count), count)
        assert list(found) == list(islice(plain.ranked(draft, position, path, 4), count))
    row, before = rows[0], rows[0].copy()
    if not more or np.isfinite(plain.processed(row, path).max()):
        assert new.choose(row, position, path) == plain.choose(row, position, path)
    assert next(new.ranked(row, position, path), None) == next(plain.ranked(row, position, path), None)
    assert np.array_equal(row, before), "the caller's logits are as they were"
    return len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("vocabs", [VOCABS[:4], VOCABS[4:]], ids=["small", "large"])
@settings(max_examples=150)
@given(st.integers(0, 2**63), st.data())
def test_tokens_and_scores_are_the_plain_ones(vocabs, seed, data):
    with np.errstate(over="ignore"):
        compare(np.random.default_rng(seed), data.draw(st.sampled_from(vocabs)))


@settings(max_examples=60)
@given(st.integers(0, 2**63), st.sampled_from([61, 9001]))
def test_tokens_and_scores_are_the_plain_ones_under_a_constraint(seed, vocab):
    random = np.random.default_rng(seed)
    words = tuple((int(token),) for token in random.integers(0, vocab, random.choice([1, 5, 40])))
    with np.errstate(over="ignore"):
        compare(random, vocab, {"constraint": OneOf(words, 2)})


def rankings(row, **params):
    made = SamplingParams(**params)
    for each in (Sampler(made, 3, [], row.size), PlainSampler(made, 3, [], row.size)):
        yield list(each.ranked(row, 7, ()))


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7}, {"temperature": 1.4, "top_k": 600, "top_p": 0.8}], ids=str
)
def test_all_of_a_ranking_is_the_plain_one(params):
    """Far more tokens than were looked for, equals among them, each once."""
    row = np.round(np.random.default_rng(1).normal(0, 3, 9001), 1).astype(np.float32)
    new, plain = rankings(row, **params)
    assert new == plain
    assert len(new) == 9001 or "top_k" in params


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("params", CUTS[1:])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_row_with_what_is_no_number_has_no_ranking(params, wrong):
    for vocab, temperature in itertools.product((61, 9001), (0.0, 0.7)):
        row = row_of(np.random.default_rng(vocab), vocab)
        row[vocab // 2] = wrong
        sampler = Sampler(SamplingParams(temperature=temperature, **params), 3, [], vocab)
        assert not list(sampler.ranked(row, 7, ()))


@pytest.mark.soak
@pytest.mark.parametrize("part", range(40))
def test_a_million_rows_are_the_plain_ones(part):
    random, done = np.random.default_rng([9, part]), 0
    with np.errstate(over="ignore"):
        while done < 25_000:
            done += compare(random, int(random.choice([61, 61, 61, 61, 997, 997, 9001])))
