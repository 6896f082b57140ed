"""A sequence keeps what was emitted, ends where it has to and says why, and knows when it may draft."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime import Limits, RequestMetrics, SamplingParams, TreeSpec
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
    for count, token in enumerate([5, 6, 5], 1):
        sequence.emit(token, EOS)
        assert (len(sequence.output), sequence.tokens[-1], sequence.history[-1]) == (count, token, token)
    assert (sequence.tokens, sequence.output) == ([3, 4, 5, 6, 5], [5, 6, 5])
    assert sequence.history.tolist() == sequence.tokens
    assert np.shares_memory(before, sequence.history), "the history is no copy"
    assert before.tolist() == [3, 4]
    assert sequence.string == string_of(sequence.tokens) == "\3\4\5\6\5"
    assert sequence.detokenizer.text == "fgf"
    assert sequence.sampler.processed(np.ones(12, dtype=np.float32), ()).tolist() == [
        *[1.0] * 3,
        *[0.5] * 2,  # the prompt's: repeated
        *[-0.5] * 2,  # emitted: repeated, and present
        *[1.0] * 5,
    ]


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, 11), min_size=1, max_size=6),
    output=st.lists(st.integers(0, 11), min_size=1, max_size=12),
    limit=st.integers(1, 12),
    eos=st.frozensets(st.integers(0, 11), max_size=3),
    ignore_eos=st.booleans(),
    stop=st.lists(st.text("abcdefghijkl", min_size=1, max_size=3), max_size=2),
)
def test_reasons_against_a_naive_decoder(
    request_of: Make,
    prompt: list[int],
    output: list[int],
    limit: int,
    eos: frozenset[int],
    ignore_eos: bool,
    stop: list[str],
) -> None:
    sequence = of(request_of, prompt, max_new_tokens=limit, ignore_eos=ignore_eos, stop=stop)
    text, reason = "", None
    for count, token in enumerate(output, 1):
        sequence.emit(token, eos)
        ended = token in eos and not ignore_eos
        text += "" if ended else chr(97 + token)
        if ended or any(word in text for word in stop):
            reason = "stop"
        elif count == limit:
            reason = "length"
        assert sequence.finish_reason == reason
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


@pytest.mark.parametrize(
    ("limits", "batch", "nodes"),
    [
        (Limits(), 1, 6),
        (Limits(max_draft_tokens=4), 1, 4),
        (Limits(max_draft_tokens=0), 1, None),
        (Limits(num_speculative_tokens_per_batch_size={"1-1": 5, "2-4": 2, "5-8": 0}), 3, 2),
        (Limits(num_speculative_tokens_per_batch_size={"1-1": 5, "2-4": 2, "5-8": 0}), 5, None),
    ],
)
def test_a_round_s_tree_is_no_larger_than_its_limits(
    request_of: Make, limits: Limits, batch: int, nodes: int | None
) -> None:
    sequence, plain = (of(request_of, [3, 4], speculation=asked) for asked in ("topk:2,3", "off"))
    for each in (sequence, plain):
        each.limit_tree(limits, batch)
    assert (sequence.shape and sequence.shape.nodes, plain.shape) == (nodes, None)
    assert sequence.tree == TreeSpec.parse("topk:2,3"), "what was asked for stays"
    sequence.limit_tree(Limits(), 1)
    assert sequence.shape == sequence.tree, "each round anew"


def test_a_failing_detokenizer_leaves_the_token_emitted(request_of: Make) -> None:
    """Whoever called has the error, and the tokens are whole."""

    class Broken:
        def push(self, token: int) -> bool:
            raise ValueError("no text")

    sequence = of(request_of, [3])
    sequence.detokenizer = Broken()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="no text"):
        sequence.emit(5, NONE)
    assert (sequence.tokens, sequence.output, sequence.history.tolist()) == ([3, 5], [5], [3, 5])


def test_a_prompt_past_the_limit_is_held_all_the_same(request_of: Make) -> None:
    """As measurements make them: they read a text, and emit nothing."""
    template = of(request_of, [3])
    fields = {name: getattr(template, name) for name in ("params", "sampler", "tree", "detokenizer")}
    sequence = Sequence(index=0, tokens=[1, 2, 3, 4], metrics=RequestMetrics(4, 0, "off"), limit=2, **fields)
    assert sequence.history.tolist() == [1, 2, 3, 4]
    assert not sequence.drafts


def test_a_deadline_counts_from_submission(request_of: Any) -> None:
    for asked, ends in ((2.5, 102.5), (None, math.inf)):
        sequence = request_of([1, 2], SamplingParams(max_new_tokens=3, speculation="off", deadline=asked))
        sequence.submit(100.0)
        assert (sequence.deadline, sequence.metrics.submitted) == (ends, 100.0)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_what_stopped_it_is_named_as_in_vllm(request_of: Make, ignore_eos: bool) -> None:
    """A stop string, a token that was asked to stop it; nothing for an end token of the model's own."""
    for params, token, want in (
        ({"stop": "f"}, 5, ("stop", "f", "")),
        ({"stop_token_ids": [5]}, 5, ("stop", 5, "")),
        ({"stop_token_ids": [7]}, 7, ("stop", 7 if ignore_eos else None, "")),
        ({}, 5, (None, None, "f")),
    ):
        sequence = of(request_of, [3, 4], ignore_eos=ignore_eos, **params)
        sequence.emit(token, EOS)
        assert (sequence.finish_reason, sequence.stop_reason, sequence.detokenizer.text) == want


def test_a_failure_is_kept_in_one_line_with_its_cause(request_of: Make) -> None:
    for cause, line in ((OptionError("no"), "no"), (ValueError("a\n  b\tc"), "decoding failed, ValueError: a b c")):
        sequence = of(request_of, [3], max_new_tokens=1)
        sequence.emit(5, NONE)
        sequence.fail(cause)
        assert (sequence.finish_reason, sequence.output, str(sequence.error)) == ("error", [5], line)
        assert cause in (sequence.error, sequence.error and sequence.error.__cause__)
