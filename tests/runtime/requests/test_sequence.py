"""A sequence keeps what was emitted, ends where it has to and says why, and knows when it may draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime import Limits, SamplingParams, TreeSpec
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.sequence import Sequence, string_of

Make = Callable[..., Sequence]
EOS, NONE = frozenset({0, 7}), frozenset[int]()


def of(request_of: Make, prompt: list[int], **params: Any) -> Sequence:
    return request_of(prompt, SamplingParams(**{"speculation": "off"} | params))


def test_a_text_to_search_has_a_character_for_each_token() -> None:
    for token in (0, 0xD800, 262143, 1 << 20, 1 << 30):  # a surrogate, and ids that are no character's
        assert len(string_of([token, 7])) == 2
    assert len(set(string_of(range(1 << 18)))) == 1 << 18


def test_what_is_emitted_is_kept_everywhere(request_of: Make) -> None:
    sequence = of(request_of, [3, 4], max_new_tokens=9, repetition_penalty=2.0, presence_penalty=1.0)
    before = sequence.history
    for token in (5, 6, 5):
        sequence.emit(token, EOS)
    assert (sequence.tokens, sequence.output, sequence.detokenizer.text) == ([3, 4, 5, 6, 5], [5, 6, 5], "fgf")
    assert sequence.history.tolist() == sequence.tokens
    assert np.shares_memory(before, sequence.history), "the history is no copy"
    assert sequence.string == string_of(sequence.tokens) == "\3\4\5\6\5"
    scores = sequence.sampler.processed(np.ones(8, dtype=np.float32), ()).tolist()
    assert scores == [1.0, 1.0, 1.0, 0.5, 0.5, -0.5, -0.5, 1.0], (
        "the prompt's are repeated, what was emitted is present"
    )


TOKENS = st.integers(0, 11)


@settings(deadline=None)
@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=6),
    output=st.lists(TOKENS, min_size=1, max_size=12),
    limit=st.integers(1, 12),
    eos=st.frozensets(TOKENS, max_size=3),
    ignore_eos=st.booleans(),
    stop=st.lists(st.text("abcdefghijkl", min_size=1, max_size=3), max_size=2),
    stop_token_ids=st.lists(TOKENS, max_size=2),
)
def test_reasons_against_a_naive_decoder(
    request_of: Make, prompt: list[int], output: list[int], limit: int, eos: frozenset[int], **fields: Any
) -> None:
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
        assert sequence.stop_reason in ([None] if ended else [token] if asked else words or [None])
        assert sequence.tokens == prompt + sequence.output == sequence.history.tolist()
        if reason:
            break
    assert sequence.output == output[: len(sequence.output)]


def test_it_drafts_between_its_prompt_and_its_last_token(request_of: Make) -> None:
    """Neither while the prompt is read, nor where one token alone is left, nor where nobody asked for a tree."""
    sequence, plain = (of(request_of, [3, 4, 5], max_new_tokens=3, speculation=asked) for asked in ("chain:4", "off"))
    seen = []
    for cached in (0, 1, 2):
        sequence.cached = plain.cached = cached
        seen.append((sequence.pending, sequence.drafts, plain.drafts))
    assert seen == [(3, False, False), (2, False, False), (1, True, False)]
    for left in (2, 1):
        sequence.emit(5, NONE)
        sequence.cached += 1
        assert sequence.drafts == (left > 1)


SCHEDULE = Limits(num_speculative_tokens_per_batch_size={"1-1": 5, "2-4": 2, "5-8": 0})


@pytest.mark.parametrize(
    ("limits", "batch", "nodes"),
    [(Limits(), 1, 6), (Limits(max_draft_tokens=4), 1, 4), (Limits(0), 1, None), (SCHEDULE, 3, 2), (SCHEDULE, 5, None)],
)
def test_a_round_s_tree_is_no_larger_than_its_limits(
    request_of: Make, limits: Limits, batch: int, nodes: int | None
) -> None:
    sequence, plain = (of(request_of, [3, 4], speculation=asked) for asked in ("topk:2,3", "off"))
    for each in (sequence, plain):
        each.limit_tree(limits, batch)
    assert (sequence.shape and sequence.shape.nodes, plain.shape) == (nodes, None)
    sequence.limit_tree(Limits(), 1)
    assert sequence.shape == sequence.tree == TreeSpec.parse("topk:2,3"), "what was asked for stays, each round anew"


def test_a_failure_is_kept_in_one_line_with_its_cause(request_of: Make) -> None:
    for cause, line in ((OptionError("no"), "no"), (ValueError("a\n  b\tc"), "decoding failed, ValueError: a b c")):
        sequence = of(request_of, [3], max_new_tokens=1)
        sequence.emit(5, NONE)
        sequence.fail(cause)
        assert (sequence.finish_reason, sequence.output, str(sequence.error)) == ("error", [5], line)
        assert cause in (sequence.error, sequence.error and sequence.error.__cause__)
