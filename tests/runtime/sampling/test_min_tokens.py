"""A least length: no token that ends a text before it, whatever is drafted and whatever else constrains."""

from dataclasses import replace

import numpy as np
import pytest
from constraints import OneOf
from small_grammars import END, TOKENS, grammar, ids

from specbuild.runtime import SamplingParams
from specbuild.runtime.errors import OptionError
from specbuild.runtime.sampling.constraint import Foreseeing, unpack
from specbuild.runtime.sampling.min_tokens import MinTokens
from specbuild.runtime.sampling.sampler import Sampler

VOCAB = 70


def test_ends_are_illegal_until_there_are_enough():
    matcher, illegal = MinTokens(3, [4, 65, 9999]).matcher(VOCAB), [4, 65]
    for emitted in range(4):
        for path in range(5):
            mask = matcher.mask([1] * path)
            assert ([] if mask is None else np.flatnonzero(~unpack(mask, VOCAB)).tolist()) == (
                illegal if emitted + path < 3 else []
            )
        matcher.emit(1)


@pytest.mark.parametrize(
    ("fields", "path", "told"),
    [
        ({"regex": "ab"}, "ab", "it ends 2 tokens before min_tokens"),
        ({"choice": ["1\n"]}, "1", "this model's tokens cannot write it"),
    ],
)
def test_a_text_that_can_go_on_nowhere_says_why(fields, path, told):
    params = SamplingParams(constraint=MinTokens(3, [END], grammar(**fields)))
    sampler = Sampler(params, 0, [], len(TOKENS))
    with pytest.raises(OptionError, match=f"cannot go on as it has to: {told}"):
        sampler.choose(np.zeros(len(TOKENS), np.float32), 1, ids(path))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_are_long_enough_and_the_same_with_every_tree(four, temperature):
    """Nearly every token ends the text here, so that without it nearly none is longer than a token."""
    (free,) = four.generate("import os\n", SamplingParams(24, temperature=temperature, seed=1))
    ends = tuple(dict.fromkeys(free.token_ids))[:20]
    params = SamplingParams(24, temperature=temperature, seed=1, stop_token_ids=ends, min_tokens=6)
    trees = [replace(params, speculation=speculation) for speculation in ("off", "auto", "chain:4", "best:8")]
    found, (short,) = (
        four.generate(["import os\n"] * 4, trees),
        four.generate("import os\n", replace(params, min_tokens=0)),
    )
    assert len({tuple(result.token_ids) for result in found}) == len(short.token_ids) == 1
    assert not set(found[0].token_ids[:6]) & set(ends)


def test_the_models_own_end_counts_unless_it_is_ignored(four):
    eos = four.manifest.eos_token_ids[0]
    eager = SamplingParams(8, logit_bias={eos: 1e6}, min_tokens=5)
    (result,) = four.generate("x", eager)
    assert (len(result.token_ids), result.token_ids[-1], result.finish_reason) == (6, eos, "stop")
    (ignored,) = four.generate("x", SamplingParams(8, logit_bias={eos: 1e6}, min_tokens=5, ignore_eos=True))
    assert ignored.token_ids == [eos] * 8


def test_stop_strings_count_from_then_on(four):
    """A letter that is in the text before and after; whatever is drafted the same token ends it."""
    params = SamplingParams(40, temperature=0.9, seed=3)
    (free,) = four.generate("def main(", params)
    grown = [four.decode(free.token_ids[:count]) for count in range(41)]
    letter = next(each for each in grown[10] if each.isalpha() and each in grown[40][len(grown[10]) :])
    least = next(count for count in range(11, 41) if letter in grown[count][len(grown[10]) :])
    stopping = replace(params, stop=(letter,), min_tokens=10)
    trees = [replace(stopping, speculation=speculation) for speculation in ("off", "chain:4", "best:8")]
    for stopped in four.generate(["def main("] * 3, trees):
        assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:least], "stop")
        assert stopped.text == grown[least][: grown[least].index(letter, len(grown[10]))]


@pytest.mark.parametrize(
    ("least", "ends", "path", "guess", "followed"),
    [
        *((2, "</s>", "", "", "ab cd"), (2, "</s>", "ab", "cd", "cd"), (2, "</s>", "ab cd", "", "</s>")),
        *((3, "</s> cd", "", "", "ab"), (3, "</s> cd", "ab cd", "", "")),
    ],
)
def test_what_follows_ends_before_a_token_that_may_not_come_yet(least, ends, path, guess, followed):
    matcher = MinTokens(least, ids(ends), grammar(regex="abcd")).matcher(12)
    assert isinstance(matcher, Foreseeing)
    assert matcher.follow(ids(path), ids(guess), 9) == ids(followed)
    for token in ids(path):
        matcher.emit(token)
    assert matcher.follow((), ids(guess), 9) == ids(followed)
    assert not isinstance(MinTokens(4, [END], OneOf(((1,),), 0)).matcher(VOCAB), Foreseeing)
