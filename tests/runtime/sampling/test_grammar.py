"""Grammars' masks at any node, and what they force: a walk over paths never changes where the text is."""

import gc
import random
import re
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_grammars import END, START, TOKENS, VOCAB, grammar, ids, legal, vocabulary

from specbuild.runtime.errors import ExecutionError, OptionError
from specbuild.runtime.sampling.constraint import unpack
from specbuild.runtime.sampling.grammar import Free, Grammars
from specbuild.runtime.sampling.grammar_process import grammar_of
from specbuild.runtime.sampling.sampler import Sampler, SamplingParams
from specbuild.runtime.sampling.structured import StructuredOutputs

FORKED = "ab(c|d0+|a)1?"


def test_masks_are_of_the_path():
    matcher = grammar(regex=FORKED).matcher(VOCAB)
    assert legal(matcher) == {*ids("ab aba")} | ({*ids("a")} & legal(matcher))
    assert legal(matcher, ids("ab d")) == {*ids("0")}
    assert legal(matcher, ids("ab d 0 0")) == {*ids("0 1"), END}
    assert legal(matcher, [*ids("ab c 1"), END, END]) == {END}
    with pytest.raises(ExecutionError, match="not what the structured output allows"):
        matcher.mask(ids("ab 1"))
    assert legal(matcher, ids("ab")) == {*ids("a c d")}, "an error changes nothing"


@pytest.mark.parametrize("seed", range(5))
def test_where_it_was_asked_before_does_not_matter(seed):
    """Random walks, with questions about other paths between, against a matcher that is asked once."""
    rng, constraint = random.Random(seed), grammar(regex="(a(b|cd)*,)*0{2,4}|(ab,?)*1")
    matcher, text = constraint.matcher(VOCAB), list[int]()
    while END not in text and len(text) < 30:
        for _ in range(4):
            path = list[int]()
            for _ in range(rng.randrange(5)):
                path.append(rng.choice(sorted(legal(matcher, path))))
            fresh = constraint.matcher(VOCAB)
            for token in text:
                fresh.emit(token)
            assert legal(fresh, path) == legal(matcher, path)
            run = matcher.follow(path, (), 6)
            assert run == fresh.follow(path, (), 6)
            for place, token in enumerate(run):
                assert legal(matcher, [*path, *run[:place]]) == {token}
        text.append(rng.choice(sorted(legal(matcher))))
        matcher.emit(text[-1])


def test_of_several_ends_all_are_legal_and_the_first_is_guessed():
    matcher = grammar((END, START), regex="ab").matcher(VOCAB)
    assert legal(matcher, ids("ab")) == {START, END}
    assert matcher.follow((), (), 4) == ids("ab")
    assert matcher.follow(ids("ab"), (), 4) == [END]


@pytest.mark.parametrize("choice", [["a,b", "0"], ['c"d', "1\n", "\\d", "é"]])
def test_choices_are_texts_not_patterns(choice):
    """What the vocabulary cannot write is no text: it ends where nothing is legal, and harms nobody else."""
    texts, waiting = set(), [list[int]()]
    matcher = grammar(choice=[*choice, "cd"]).matcher(VOCAB)
    while waiting:
        text = waiting.pop()
        if END in text:
            texts.add("".join("a b c d 0 1 , ab cd aba".split()[token] for token in text[:-1]))
        else:
            waiting += [[*text, token] for token in legal(matcher, text)]
    assert texts == {"cd", *(each for each in choice if set(each) <= set("abcd01,"))}


def test_before_its_token_a_text_is_free_and_does_not_end():
    matcher = Free(*ids(","), (END,), grammar(regex="ab")).matcher(VOCAB)
    assert legal(matcher) == set(range(VOCAB)) - {END}
    stuck = Free(*ids(","), (END,), grammar(choice=["1\n"])).matcher(VOCAB)
    assert (legal(stuck, ids("0 , 1")), bool(stuck.why(ids("0 , 1"))), stuck.why(ids("0"))) == (set(), True, "")
    assert legal(matcher, ids("0 , ab")) == {END}
    assert [matcher.follow(ids(path), (), 4) for path in ("0", "0 ,")] == [[], ids("ab")]
    assert matcher.follow((), ids("0 0 , 1"), 9) == ids("0 0 , ab")
    assert matcher.follow((), [*ids("0"), END, *ids(",")], 9) == ids("0")
    for token in ids("1 0 ,"):
        matcher.emit(token)
    assert legal(matcher, ids("ab")) == {END}
    matcher.emit(*ids("ab"))
    assert legal(matcher) == {END}


class Counting:
    """A compiler in this process."""

    def __init__(self, size):
        self.asked, self.size, self.closed = list[str](), size, False

    def check(self, outputs):
        self.asked.append(str(outputs.regex))
        return grammar_of(outputs.to_dict()), self.size

    def close(self):
        self.closed = True


def grammars(size, cache, **fuel):
    compiler = Counting(size)
    return Grammars(vocabulary, compiler, cache, **fuel), compiler


def made(of, regex, **more):
    return of.constraint(StructuredOutputs(regex=regex, **more), {",": 6}.get)


@pytest.mark.slow
def test_the_cache_is_bounded_by_bytes_and_what_is_used_stays():
    kept, compiler = grammars(1 << 20, 2 << 20)
    held = made(kept, "a")
    for regex in "bcbd":
        made(kept, regex)
    assert compiler.asked == ["a", "b", "c", "d"]
    assert made(kept, "a") is held
    made(kept, "c")
    assert compiler.asked == ["a", "b", "c", "d", "c"]
    gone = weakref.ref(held)
    del held
    gc.collect()
    assert gone() is None
    kept.close()
    assert compiler.closed
    kept, compiler = grammars(1, 1 << 20)
    for letter in "aba":  # a long one counts for its text, however little the compiler's process grew by
        made(kept, letter * 80_000)
    assert len(compiler.asked) == 3


def test_after_which_token():
    kept, _ = grammars(1, 1 << 20)
    assert legal(made(kept, "ab", after=",").matcher(VOCAB)) == set(range(VOCAB)) - {END}
    with pytest.raises(OptionError, match="'</think>', which is no token"):
        made(kept, "ab", after="</think>")
    with pytest.raises(OptionError, match="structured_outputs cannot be used"):
        made(kept, "a(")


def test_threads_share_what_is_compiled():
    kept, _ = grammars(1, 1 << 20)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: legal(made(kept, "a{3}").matcher(VOCAB)), range(4))]
    assert found == [legal(grammar(regex="a{3}").matcher(VOCAB))] * 4


def test_without_llguidance_it_is_said_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OptionError, match=r"pip install 'specbuild-trt\[structured\]'"):
        made(grammars(1, 1)[0], "a")


def test_past_the_model_s_vocabulary_nothing_is_asked():
    """A tokenizer may know more tokens than the model has logits for."""
    matcher = grammar(regex="[a-d]+").matcher(9)
    assert matcher.mask(()).shape == (1,)
    assert np.flatnonzero(unpack(matcher.mask(()), 9)).tolist() == ids("a b c d ab cd")


@pytest.mark.parametrize(
    ("regex", "path", "guess", "followed"),
    [
        ("abcd", "", "", "ab cd"),
        ("abcd", "ab cd", "", "</s>"),
        ("abcd", "ab cd </s>", "", "</s>"),
        ("(a|0)cd1", "0", "", "cd 1"),
        ("0+", "0", "", ""),
        ("(a|b)cd(0|1),ab", "", "a cd 0 0", "a cd 0 , ab"),
        ("(a|b)cd(0|1),ab", "b cd", "cd", ""),
    ],
)
def test_what_is_forced_or_guessed_is_followed_as_far_as_it_is_legal(regex, path, guess, followed):
    matcher = grammar(regex=regex).matcher(VOCAB)
    for most in (9, 2, 0):
        assert matcher.follow(ids(path), ids(guess), most) == ids(followed)[:most]


def test_a_sampler_chooses_what_is_forced_whatever_the_logits():
    """But a logit that is no number stays an error; and what is drafted is legal."""
    params = SamplingParams(temperature=1.0, seed=1, constraint=grammar(regex="ab(c|d)"))
    sampler, row = Sampler(params, 1, [1], VOCAB), np.zeros(VOCAB, dtype=np.float32)
    row[ids("ab")] = -80
    assert sampler.choose(row, 1, ids("ab c")) == END
    assert sampler.foresees
    assert sampler.follow((), (), 4) == ids("ab")
    assert {token for token, _ in sampler.drafted(row, 2, ids("ab"), 4)} == {*ids("c d")}
    row[END] = -np.inf
    with pytest.raises(ExecutionError, match="no token that the constraint allows"):
        sampler.choose(row, 1, ids("ab c"))


def test_a_branch_that_comes_to_nothing_harms_no_other():
    """Nothing in the vocabulary writes what has to come after 1: llguidance's matcher would stay in its error."""
    matcher = grammar(choice=["1\n", "0,"]).matcher(VOCAB)
    assert legal(matcher, ids("1")) == set()
    assert matcher.why(ids("1"))
    assert legal(matcher, ids("0")) == {*ids(",")}
    matcher.emit(ids("0")[0])
    assert matcher.follow((), (), 3) == ids(",")


patterns = st.recursive(
    st.sampled_from(["a", "b", "cd", "[a-d]", "(a|ab)", "0*", "1?"]),
    lambda inner: (
        st.builds("({}{})".format, inner, inner)
        | st.builds("({}|{})".format, inner, inner)
        | st.builds("({}){{{},{}}}".format, inner, st.integers(0, 2), st.integers(2, 40))
        | st.builds("({})*".format, inner)
    ),
    max_leaves=6,
)


@settings(max_examples=80)
@given(pattern=patterns, states=st.integers(16, 40), items=st.integers(4, 60), seed=st.integers(0, 99))
def test_where_llguidance_gives_up_no_text_is_complete(pattern, states, items, seed):
    """With limits that are soon reached: a text ends where it matches, goes on, or there is a reason."""
    rng, text = random.Random(seed), ""
    fuel = {"max_lexer_states": states, "step_max_items": items, "verbose_errors": False}
    try:
        made = grammar(fuel=fuel, grammar=f"start: ITEM ITEM?\nITEM: /{pattern}/")
    except ValueError:
        return
    matcher, at_once, path = made.matcher(VOCAB), made.matcher(VOCAB), list[int]()
    for _ in range(30):
        allowed = legal(matcher)
        assert legal(at_once, path) in (allowed, set()), "other states may be spent"
        if END in allowed:
            assert re.fullmatch(f"{pattern}({pattern})?", text)
        if not allowed:
            assert matcher.why(())
            return
        token = (matcher.follow((), (), 1) or rng.choices(sorted(allowed)))[0]
        assert token in allowed
        if token == END:
            return
        matcher.emit(token)
        path.append(token)
        text += TOKENS[token]


def test_a_grammar_whose_limits_are_reached_is_compiled_again():
    """The states of a lexer are shared by all texts; an error in one must not end all that come later."""
    kept, compiler = grammars(1, 1 << 20, fuel={"max_lexer_states": 40, "verbose_errors": False})
    spent = made(kept, "(a|b)*a(a|b){20}").matcher(VOCAB)
    rng = random.Random(1)
    while allowed := legal(spent):
        spent.emit(rng.choice(sorted(allowed - {END})))
    assert "too many states" in spent.why(())
    assert legal(made(kept, "(a|b)*a(a|b){20}").matcher(VOCAB))
    assert len(compiler.asked) == 2


def test_a_token_that_ends_a_text_ends_it_wherever_a_grammar_names_it():
    matcher = grammar(grammar='start: "a" <s> "b" | "cd" </s> "b" | "d" </s>').matcher(VOCAB)
    assert legal(matcher, ids("a")) == {START}
    assert legal(matcher, ids("cd")) == set()
    assert matcher.why(ids("cd"))


@pytest.mark.parametrize("header", ["", "%llguidance {}\n", "// one\n%llguidance {}\n"])
def test_patterns_that_never_end_hang_nothing(header):
    """The first pattern takes all there is of b, so that no text ends: tokens would be forced for ever."""
    matcher = grammar(grammar=f'{header}start: ("a" | "d") N\nN: M\nM: /b+/ // and\n').matcher(VOCAB)
    assert legal(matcher, ids("a")) == {*ids("b")}
    endless = grammar(grammar=f'{header}start: ("a" | "d") n n\nn: /b+/\n').matcher(VOCAB)
    for token in ids("d b b b"):
        endless.emit(token)
    assert legal(endless) == {*ids("b")}
    assert endless.follow((), (), 5) == []
