"""Bitmasks of legal tokens, and choices among them."""

import numpy as np
import pytest
from constraints import OneOf
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.errors import ExecutionError, OptionError
from specbuild.runtime.sampling.constraint import only, pack, tree_masks, unpack, words
from specbuild.runtime.sampling.sampler import Sampler, SamplingParams
from specbuild.runtime.speculation.tree import Tree

VOCAB = 70
FORKED = OneOf(((5, 6, 7), (5, 6, 40), (5, 69), (31, 32, 63)), end=0)


@given(st.integers(1, 200).flatmap(lambda v: st.tuples(st.just(v), st.sets(st.integers(0, v - 1)))))
def test_a_bitmask_is_what_was_packed(given):
    vocab, tokens = given
    mask = pack(tokens, vocab)
    assert (mask.dtype, mask.shape) == (np.uint32, (words(vocab),))
    assert np.flatnonzero(unpack(mask, vocab)).tolist() == sorted(tokens)
    assert all(bool(mask[t // 32] >> np.uint32(t % 32) & 1) == (t in tokens) for t in range(vocab))
    assert only(mask, vocab) == (min(tokens) if len(tokens) == 1 else None)
    assert only(pack([vocab], vocab + 1), vocab) is None


def logits():
    return np.random.default_rng(1).normal(0, 2, VOCAB).astype(np.float32)


def sampler(**params):
    given = SamplingParams(**{"seed": 3, "constraint": FORKED} | params)
    return Sampler(given, 3, [1, 2], VOCAB)


def test_the_best_legal_token_is_chosen():
    made, row = sampler(), logits()
    assert not made.greedy
    assert made.choose(row, 1, ()) == max((5, 31), key=lambda token: row[token])
    assert made.choose(row, 2, (5,)) == max((6, 69), key=lambda token: row[token])
    for position, token in enumerate((5, 6), 2):
        made.emit(token, position)
    assert made.choose(row, 4, ()) == max((7, 40), key=lambda token: row[token])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_illegal_token_is_as_if_there_were_none(temperature):
    """Whatever its logit is, and whatever else is done to it."""
    row = logits()
    row[[8, 9]] = np.nan, np.inf
    cut = {"top_p": 0.9} if temperature else {}
    for more in ({}, {"repetition_penalty": 1.4, "logit_bias": {8: 99.0}}):
        assert sampler(temperature=temperature, **cut, **more).choose(row, 1, ()) in (5, 31)
    row[[5, 31]] = -np.inf
    made = sampler(temperature=temperature, **cut)
    assert list(made.ranked(row, 1, ())) == []
    with pytest.raises(ExecutionError, match="no token that the constraint allows"):
        made.choose(row, 1, ())


def test_each_node_of_a_tree_has_its_own():
    """Below what is illegal nothing is asked, and nothing is forbidden."""
    tree = Tree([2])
    five = tree.add(5, 0)
    six, wrong = tree.add(6, five), tree.add(50, 0)
    below = tree.add(51, wrong)
    out = np.full((8, words(VOCAB)), 0xFFFFFFFF, dtype=np.uint32)
    matcher = FORKED.matcher(VOCAB)
    tree_masks(matcher, tree, VOCAB, out)
    found = [set(np.flatnonzero(unpack(row, VOCAB)).tolist()) for row in out[[0, five, six]]]
    assert found == [{5, 31}, {6, 69}, {7, 40}]
    assert (out[[wrong, below, 5, 6, 7]] == 0xFFFFFFFF).all()
    assert matcher.asked == 3


class Saying:
    """A constraint whose matcher says the same of everything, or raises it; both are false, which is not none."""

    def __init__(self, said):
        self.said = said

    def __bool__(self):
        return False

    def matcher(self, vocab_size):
        return self

    def mask(self, path):
        if isinstance(self.said, BaseException):
            raise self.said
        return self.said

    def emit(self, token):
        pass


@pytest.mark.parametrize(
    "mask", [np.ones(VOCAB, bool), np.zeros(3, int), np.zeros(2, np.uint32), np.zeros((1, 3), np.uint32), [1, 2, 3]]
)
def test_what_is_no_bitmask_is_refused(mask):
    """On the host and for a device alike, whatever shape would fit by chance."""
    saying = Saying(mask)
    made = Sampler(SamplingParams(constraint=saying), 0, [], VOCAB)
    for call in (
        lambda: made.choose(logits(), 0, ()),
        lambda: tree_masks(saying, Tree([2]), VOCAB, np.zeros((1, 3), np.uint32)),
    ):
        with pytest.raises(ExecutionError, match=r"mask is .*, not uint32\[3\], a bit a token"):
            call()


class Panic(BaseException):
    """As a library's, which is no Exception."""


@pytest.mark.parametrize("error", [ValueError("no such rule"), Panic("out of luck")])
def test_what_is_raised_to_a_draft_is_raised_at_the_next_choice(error):
    made = Sampler(SamplingParams(constraint=Saying(error)), 0, [], VOCAB)
    assert list(made.drafted(logits(), 1, (5,), 4)) == []
    made.matcher = None
    for asked in (made.check, lambda: made.choose(logits(), 1, ())):
        with pytest.raises(type(error), match=str(error)):
            asked()


def test_an_interrupt_is_nobody_s_constraint():
    made = Sampler(SamplingParams(constraint=Saying(KeyboardInterrupt())), 0, [], VOCAB)
    with pytest.raises(KeyboardInterrupt):
        list(made.drafted(logits(), 1, (), 4))
    made.check()


@pytest.mark.parametrize(
    ("made", "told"),
    [
        *((ValueError("no such rule"), "cannot be used, ValueError"), (3, "must have mask")),
        (Panic("out\nof luck"), "cannot be used, Panic: out of luck"),
    ],
)
def test_a_constraint_that_makes_no_matcher_is_refused(made, told):
    class Bad:
        def matcher(self, vocab_size):
            if isinstance(made, BaseException):
                raise made
            return made

    with pytest.raises(OptionError, match=told):
        Sampler(SamplingParams(constraint=Bad()), 0, [], VOCAB)
