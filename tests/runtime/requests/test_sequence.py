"""A sequence keeps what was emitted, ends where it has to and says why, and knows when it may draft."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime import SamplingParams
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.token_string import string_of

EOS, NONE = frozenset({0, 7}), frozenset[int]()


def of(request_of, prompt, **params):
    return request_of(prompt, SamplingParams(**{"speculation": "off"} | params))


def test_a_text_to_search_has_a_character_for_each_token():
    for token in (0, 0xD800, 262143, 1 << 20, 1 << 30):  # a surrogate, and ids that are no character's
        assert len(string_of([token, 7])) == 2
    assert len(set(string_of(range(1 << 18)))) == 1 << 18


def test_what_is_emitted_is_kept_everywhere(request_of):
    sequence = of(request_of, [3, 4], max_new_tokens=9, repetition_penalty=2.0, presence_penalty=1.0)
    before = sequence.text.history
    for token in (5, 6, 5):
        sequence.emit(token, EOS)
    assert (sequence.tokens, sequence.output, sequence.detokenizer.text) == ([3, 4, 5, 6, 5], [5, 6, 5], "fgf")
    assert sequence.text.history.tolist() == sequence.tokens
    assert np.shares_memory(before, sequence.text.history), "the history is no copy"
    assert sequence.text.string == sequence.text.string == string_of(sequence.tokens) == "\3\4\5\6\5"
    scores = sequence.sampler.processed(np.ones(8, dtype=np.float32), ()).tolist()
    assert scores == [1.0, 1.0, 1.0, 0.5, 0.5, -0.5, -0.5, 1.0], (
        "the prompt's are repeated, what was emitted is present"
    )


TOKENS = st.integers(0, 11)


@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=6),
    output=st.lists(TOKENS, min_size=1, max_size=12),
    limit=st.integers(1, 12),
    eos=st.frozensets(TOKENS, max_size=3),
    ignore_eos=st.booleans(),
    stop=st.lists(st.text("abcdefghijkl", min_size=1, max_size=3), max_size=2),
    stop_token_ids=st.lists(TOKENS, max_size=2),
)
def test_reasons_against_a_naive_decoder(request_of, prompt, output, limit, eos, **fields):
    """What stopped it is named as in vLLM: a stop string or a token that was asked to, no end of the model's own."""
    sequence, text = of(request_of, prompt, max_new_tokens=limit, **fields), ""
    for count, token in enumerate(output, 1):
        sequence.emit(token, eos)
        ended = token in eos and not fields["ignore_eos"]
        asked = token in fields["stop_token_ids"]
        text += "" if ended or asked else chr(97 + token)
        words = [word for word in fields["stop"] if word in text]
        reason = "stop" if ended or asked or words else "length" if count == limit else None
        assert sequence.finish_reason == reason
        assert (sequence.ending.stop if sequence.ending else None) in (
            [None] if ended else [token] if asked else words or [None]
        )
        assert sequence.tokens == prompt + sequence.output == sequence.text.history.tolist()
        if reason:
            break
    assert sequence.output == output[: len(sequence.output)]


def test_a_failure_is_kept_in_one_line_with_its_cause(request_of):
    for cause, line in ((OptionError("no"), "no"), (ValueError("a\n  b\tc"), "decoding failed, ValueError: a b c")):
        sequence = of(request_of, [3], max_new_tokens=1)
        sequence.emit(5, NONE)
        sequence.fail(cause)
        assert (sequence.finish_reason, sequence.output, str(sequence.error)) == ("error", [5], line)
        assert cause in (sequence.error, sequence.error and sequence.error.__cause__)
