"""Log-probabilities: OpenAI's two shapes, and no more of them than memory allows."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from serving import until
from text_tokenizers import KINDS, MARK, SIZE, level_name

from specbuild.runtime import SamplingParams, TokenLogprobs
from specbuild.runtime.requests.tokenizer import Tokenizer
from specbuild.serve.errors import ApiError
from specbuild.serve.openai import logprobs
from specbuild.serve.request.prepare import check_echo


def test_too_much_is_refused(engine):
    with pytest.raises(ApiError, match="shorten"):
        check_echo(engine, [[5], [5] * (1 << 16)])


def test_a_prompt_s_are_those_of_its_logits(engine):
    """Whatever is in the cache, and in steps with other sequences."""
    tokens = engine.encode("def main(argv):\n    return parse(argv)\n" * 6)
    rows = engine.text_logits(tokens[:-1])
    want = [TokenLogprobs.of(row, token, 2) for row, token in zip(rows, tokens[1:], strict=True)]
    params = [SamplingParams(max_new_tokens=4, prompt_logprobs=2), SamplingParams(max_new_tokens=24)]
    for _ in range(2):
        scored, other = engine.generate([tokens, tokens], params)
        first, *found = scored.prompt_logprobs or ()
        assert (first, other.prompt_logprobs) == (None, None)
        assert [each and each.token_id for each in found] == tokens[1:]
        assert [each.logprob for each in found if each] == pytest.approx([each.logprob for each in want], abs=1e-3)
        assert scored.token_ids == other.token_ids[:4]
    (alone,) = engine.generate([tokens[:1]], params[0])
    assert alone.prompt_logprobs == []


@pytest.mark.slow
def test_echo_with_logprobs_waits_for_nobody(make_client):
    client = make_client()
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(client.ask, max_tokens=900, ignore_eos=True, speculation="off")
        until(lambda: client.service.requests)
        told = client.ask(echo=True, logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
        assert not long.done()
        assert len(told["tokens"]) == len(told["token_logprobs"]) > 2
        assert long.result()["usage"]["completion_tokens"] == 900


def test_infinity_is_a_number(engine):
    tokens = [TokenLogprobs(5, float("-inf"), ((5, float("-inf")), (6, -1.0)))]
    assert logprobs.completion(engine, [(5, tokens[0], 3)])["token_logprobs"] == [-9999.0]
    (content,) = logprobs.chat(engine, tokens)["content"]
    assert (content["logprob"], content["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


@cache
def tokenizer(kind):
    return Tokenizer(KINDS[kind]().to_str().encode(), None, {})


def characters(data):
    """How many bytes each character of a text has; U+FFFD stands for each maximal subpart of what is no UTF-8."""
    if not data:
        return []
    text = data.decode(errors="replace")
    sizes = [n for n in (4, 3, 2, 1) if len(data[:n].decode(errors="replace")) == 1]
    size = next(n for n in sizes if text == text[0] + data[n:].decode(errors="replace"))
    return [size, *characters(data[size:])]


BYTES = [tokenizer("byte_level").token_id(level_name(bytes([byte]))) for byte in range(256)]


@given(ids=st.lists(st.sampled_from(BYTES) | st.integers(2, SIZE - 1), min_size=1, max_size=12))
@example(ids=[BYTES[byte] for byte in b"\xed\xa0a"])  # a surrogate begins, which is no character
def test_a_token_of_bytes_begins_in_the_character_of_its_first(ids):
    made = tokenizer("byte_level")
    parts = [made.token_bytes(token) for token in ids]
    begins, ends = logprobs.Offsets(made, (), lambda *_: True), list(accumulate(characters(b"".join(parts))))
    starts = accumulate(map(len, parts[:-1]), initial=0)
    assert [begins.next(token) for token in ids] == [sum(end <= start for end in ends) for start in starts]


def completed(client, **fields):
    """Text, and tokens with their offsets, the same whole and streamed, where none is told before its text is."""

    def told(choice):
        return [*zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True)]

    (whole,) = client.ask(**fields, logprobs=0)["choices"]
    text, offsets = "", list[tuple[str, int]]()
    for event in client.events(**fields, logprobs=0):
        text += event["choices"][0]["text"]
        offsets += told(event["choices"][0])
        assert all(offset <= len(text) for _, offset in offsets)
    assert (text, offsets) == (whole["text"], told(whole))
    return text, offsets


@pytest.mark.slow
@pytest.mark.parametrize("echo", [False, True])
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=st.text(min_size=1, max_size=12), stops=st.booleans(), seed=st.integers(0, 99))
@example(prompt="a\u2028b\x85", stops=False, seed=0)  # which end no line of a stream
def test_text_offsets_of_random_texts(client, echo, prompt, stops, seed):
    """Hot enough for parts of characters; with a stop string, whose tokens begin where the text ends."""
    fields = {"prompt": prompt, "echo": echo, "temperature": 3, "seed": seed}
    text, told = completed(client, **fields)
    if stops and text[-4:-2]:
        text, told = completed(client, **fields, stop=[text[-4:-2]])
    assert [offset for _, offset in told] == sorted(offset for _, offset in told)
    for token, offset in told:
        assert offset <= len(text)
        if "\ufffd" not in token and not token.startswith("<|"):
            assert text[offset:].startswith(token) or (stops and token.startswith(text[offset:]))


def test_a_special_token_counts_where_a_prompt_spells_it():
    """One that the tokenizer adds, such as a BOS, does not."""
    made, text = tokenizer("byte_level"), f"a{MARK}b"
    (a, mark, b) = (made.token_id(each) for each in ("a", MARK, "b"))
    begins = logprobs.Offsets(made, (), lambda shown, at: text.startswith(shown, at))
    assert [begins.next(token or 0) for token in (mark, a, mark, b)] == [0, 0, 1, 1 + len(MARK)]
