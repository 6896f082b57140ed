"""Prompt lookup: matches against a naive search, and continuations."""

from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.drafting.lookup import continuation, longest
from specbuild.runtime.requests.token_string import string_of

histories = st.lists(st.integers(0, 2), min_size=1, max_size=12)  # all of it is compared


def naive_matches(tokens):
    found = []
    for start in range(1, len(tokens)):
        length = 0
        while length < start and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        if length:
            found.append((start, length))
    return found


def naive_continuation(tokens, start, count):
    text = list(tokens)
    for offset in range(count):  # the text goes on as it did after `start`
        text.append(text[start + offset])
    return text[len(tokens) :]


@given(histories, st.integers(1, 40))
def test_the_longest_match_against_a_naive_search(tokens, count):
    assert longest(string_of(tokens)) == max(naive_matches(tokens), key=lambda match: match[::-1], default=(0, 0))
    for start, _ in naive_matches(tokens):
        assert continuation(tokens, start, count) == naive_continuation(tokens, start, count)
