"""Spellings write a text exactly, whatever tokens of the same name there are; so do literals as structured outputs."""

import random

import pytest
import text_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from small_grammars import legal

from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.tokenizer import Tokenizer
from specbuild.runtime.sampling.grammar import Grammar
from specbuild.runtime.sampling.grammar_process import Tokenizers, compiled, grammar_of
from specbuild.runtime.sampling.spelling import Spelling
from specbuild.runtime.sampling.structured import StructuredOutputs

SIZE = text_tokenizers.SIZE
NAMES = [text_tokenizers.END, text_tokenizers.MARK, text_tokenizers.MORE, *text_tokenizers.ADDED]
AROUND = ("suffixes", "rewritten")  # what a token writes depends on those around it
KINDS = sorted(text_tokenizers.KINDS.keys() - {*AROUND})
literals = st.lists(st.sampled_from([*NAMES, *text_tokenizers.SAID]), min_size=1, max_size=8).map("".join)


def tokenizer_of(kind):
    return Tokenizer(text_tokenizers.KINDS[kind](SIZE).to_str().encode(), None, {})


def vocabulary_of(tokenizer):
    return tokenizer.vocabulary(SIZE, (0,))


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_write_the_text(kind, names):
    vocabulary = vocabulary_of(tokenizer_of(kind))
    spelling = Spelling(vocabulary, names)

    @settings(max_examples=60)
    @given(literals | st.text())
    def check(text):
        ids = spelling(text)
        assert b"".join(spelling.tokens[token] for token in ids) == text.encode()
        assert not vocabulary.special.intersection(ids)

    check()


@pytest.mark.parametrize("kind", ["byte_level", "added", "byte_fallback", "prefix_space"])
def test_a_usual_text_is_spelt_as_usual(kind):
    """After another text: at its beginning some tokenizers put a space."""
    tokenizer = tokenizer_of(kind)
    spelling = Spelling(vocabulary_of(tokenizer))
    for text in ("ab.", "猫語!", "n't\n"):
        after = tokenizer.encode(f"\x02{text}")
        assert spelling(text) == after[-len(spelling(text)) :]


@pytest.mark.parametrize("kind", KINDS)
def test_a_literal_is_that_text_or_refused(kind):
    """However it is spelt, and whatever is forced; names of special tokens are spelt in pieces."""
    tokenizer = tokenizer_of(kind)
    vocabulary = vocabulary_of(tokenizer)
    llguidance = Tokenizers(vocabulary).tokenizer({})

    @settings(max_examples=70)
    @given(st.lists(literals, min_size=1, max_size=3, unique=True), st.integers(0, 2**32))
    def check(choice, seed):
        rng, outputs = random.Random(seed), StructuredOutputs(choice=choice).to_dict()
        grammar = Grammar(compiled(llguidance, grammar_of(outputs)), llguidance.vocab_size, (0,))
        matcher, ids = grammar.matcher(SIZE), list[int]()
        while (allowed := legal(matcher, (), SIZE)) != {0}:
            if not allowed:
                assert matcher.why(()) == "this model's tokens cannot write it"
                return
            drafted = matcher.follow((), (), rng.randrange(5))
            ids.append(drafted[0] if drafted else rng.choice(sorted(allowed)))
            assert ids[-1] in allowed
            matcher.emit(ids[-1])
            fresh = grammar.matcher(SIZE)
            assert legal(fresh, ids, SIZE) == legal(matcher, (), SIZE)  # whatever was drafted before
        assert tokenizer.decode([5, *ids])[len(tokenizer.decode([5])) :] in choice

    check()


@pytest.mark.parametrize("kind", AROUND)
def test_tokens_that_write_nothing_alone_are_refused(kind):
    with pytest.raises(OptionError, match="depends on those around it"):
        vocabulary_of(tokenizer_of(kind))


def test_an_added_token_is_text_unless_a_grammar_names_it():
    vocabulary = vocabulary_of(tokenizer_of("added"))
    think = next(token for token, name in vocabulary.added.items() if name == "<think>")

    def allowed(grammar, path):
        outputs = {"grammar": grammar}
        llguidance = Tokenizers(vocabulary).tokenizer(outputs)
        matcher = Grammar(compiled(llguidance, grammar_of(outputs)), llguidance.vocab_size, (0,)).matcher(SIZE)
        return think in legal(matcher, path, SIZE)

    assert allowed("start: TEXT\nTEXT: /(.|\\n)*/", [])
    assert allowed('start: "<think>" "a"', [])
    assert allowed("start: <think> TEXT\nTEXT: /(.|\\n)*/", [])
    assert not allowed("start: <think> TEXT\nTEXT: /(.|\\n)*/", [think])
