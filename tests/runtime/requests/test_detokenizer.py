"""The text of a growing output: pieces add up, characters stay whole, nothing is taken back, stop strings stop."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spellings import Spelling
from text_tokenizers import KINDS, SAID, SIZE

from specbuild.runtime.requests.detokenizer import Detokenizer
from specbuild.runtime.requests.tokenizer import Tokenizer

texts = st.text(st.characters(codec="utf-8"), max_size=30)


def stream(detokenizer, tokens):
    """The text after each token and after the end, and whether a stop string ended it."""
    shown, stopped = [""], False
    for token in tokens:
        stopped = detokenizer.push(token)
        shown.append(detokenizer.text)
        if stopped:
            break
    detokenizer.finish()
    shown.append(detokenizer.text)
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before), "text was taken back"
    return shown, stopped


@given(text=texts, prompt=texts)
def test_a_character_is_never_split(tokenizer, text, prompt):
    text = text.replace("\ufffd", "")
    tokens = [token for byte in text for token in tokenizer.encode(byte)]  # one character at a time: many tokens
    shown, _ = stream(Detokenizer(tokenizer, tokenizer.encode(prompt), ()), tokens)
    assert shown[-1] == text
    assert not any("\ufffd" in out for out in shown)


def test_text_comes_as_soon_as_it_is_whole(tokenizer):
    """What the prompt says stops nothing."""
    tokens = tokenizer.encode("🙂a")
    assert len(tokens) > 2
    shown, stopped = stream(Detokenizer(tokenizer, tokenizer.encode("def stop"), ["stop", "p🙂"]), tokens)
    assert shown == [""] * (len(tokens) - 1) + ["🙂", "🙂a", "🙂a"]
    assert not stopped


def test_a_token_costs_the_same_however_long_the_text():
    read = list[int]()

    def spell(token):
        read.append(token)
        return "ab"[token]

    shown, _ = stream(Detokenizer(Spelling(spell), [0] * 1000, ["zz"]), [0, 1] * 200)
    assert shown[-1] == "ab" * 200
    assert len(read) < 420, "each token once, and the prompt's beginning"


@settings(max_examples=150)
@given(
    pieces=st.lists(st.text("ab🙂", max_size=3), max_size=12),
    stop=st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=6),
    min_tokens=st.integers(0, 12),
)
def test_what_ends_a_text_is_what_a_search_after_each_token_finds(pieces, stop, min_tokens):
    """And what may still become a stop string is held back."""
    whole, expected = "", [""]
    for count, piece in enumerate(pieces, 1):
        begun, whole = len(whole), whole + piece
        found = [(at, at + len(each)) for each in stop for at in range(len(whole)) if whole.startswith(each, at)]
        ends = [at for at, end in found if end > begun]
        if stopped := count > min_tokens and bool(ends):
            whole = whole[: min(ends)]
        held = [
            length for length in range(len(whole) + 1) if any(s.startswith(whole[len(whole) - length :]) for s in stop)
        ]
        expected.append(whole if stopped else whole[: len(whole) - max(held, default=0)])
        if stopped:
            break
    shown, stopped = stream(Detokenizer(Spelling(pieces.__getitem__), [], stop, min_tokens), range(len(pieces)))
    assert shown[-1] == whole
    if not min_tokens:
        assert shown[:-1] == expected


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return str(request.param)


@pytest.fixture(scope="module")
def other(kind):
    """A tokenizer of the kind."""
    return Tokenizer(KINDS[kind]().to_str().encode(), None, {})


def drawn(rng, most=24):
    """Token ids, of which there may be none, or several special ones."""
    return [
        rng.choice((0, 1, SIZE - 1)) if rng.random() < 0.1 else rng.randrange(SIZE) for _ in range(rng.randrange(most))
    ]


def read_at(detokenizer, ids, places):
    """The pieces of text that are read after so many tokens, put together; what stopped it, and after how many."""
    text, count = detokenizer.text if 0 in places else "", 0
    for count, token in enumerate(ids, 1):
        if detokenizer.push(token):
            break
        if count in places:
            assert detokenizer.text.startswith(text), "text was taken back"
            text += detokenizer.text[len(text) :]
    detokenizer.finish()
    assert detokenizer.text.startswith(text), "text was taken back"
    return text + detokenizer.text[len(text) :], detokenizer.stop_reason, count


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_text_is_a_function_of_its_ids_however_they_arrive(other, count):
    """Bytes of no character, partial characters and special tokens among them; with stop strings and without."""
    rng = random.Random(count)
    for _ in range(count):
        ids, prompt, shown = drawn(rng), drawn(rng, 4), rng.random() < 0.5
        every, some = set(range(len(ids) + 1)), {rng.randrange(len(ids) + 1) for _ in range(rng.randrange(6))}
        whole, _, _ = read_at(Detokenizer(other, prompt, (), 0, shown), ids, set())
        assert prompt or whole == other.decode(ids, shown)
        stop = [whole[at : at + rng.randrange(1, 4)] or "zz" for at in (rng.randrange(len(whole) + 1), len(whole) // 2)]
        for words in ((), stop):
            found = read_at(Detokenizer(other, prompt, words, 0, shown), ids, set())
            for places in (every, some):
                assert read_at(Detokenizer(other, prompt, words, 0, shown), ids, places) == found, (ids, words, places)
        text, reason, _ = found
        assert whole.startswith(text + reason) if reason else text == whole, (ids, stop)
        assert not any(each in text for each in stop)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_a_valid_text_is_what_the_library_decodes(other, kind, count):
    """What is no UTF-8 is left out: there the library replaces more than Unicode asks for."""
    library, rng, tried = KINDS[kind](), random.Random(count), 0
    for _ in range(count):
        words = "".join(rng.choices(SAID, k=rng.randrange(12)))
        ids = library.encode(words).ids if rng.random() < 0.5 else drawn(rng, 8)
        shown = rng.random() < 0.5
        whole = library.decode(ids, skip_special_tokens=shown)
        if "\ufffd" not in whole:
            assert other.decode(ids, shown) == whole, ids
            tried += 1
    assert tried > count / 4


def test_the_bytes_of_tokens_add_up_to_the_text(other, kind):
    if kind in ("suffixes", "rewritten"):
        assert other.token_text(3), "there a token's text depends on those around it"
        return
    rng, before = random.Random(0), [3]
    for _ in range(100):
        ids = drawn(rng)
        text, _, _ = read_at(Detokenizer(other, before, (), 0, False), ids, set())
        assert b"".join(map(other.token_bytes, ids)).decode(errors="replace") == text
