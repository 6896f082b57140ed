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
from specbuild.runtime.errors import ExecutionError, OptionError
from specbuild.runtime.requests.sequence import Sequence, string_of

Make = Callable[..., Sequence]
EOS, NONE = frozenset({0, 7}), frozenset[int]()


def of(request_of: Make, prompt: list[int], **params: Any) -> Sequence:
    return request_of(prompt, SamplingParams(**{"speculation": "off"} | params))


def test_a_sequence_begins_with_its_prompt_and_nothing_else(request_of: Make) -> None:
    sequence = of(request_of, [3, 4, 5], max_new_tokens=9, speculation="topk:2,3")
    assert (sequence.tokens, sequence.output, sequence.logprobs) == ([3, 4, 5], [], [])
    assert (sequence.finish_reason, sequence.error, sequence.deadline) == (None, None, math.inf)
    assert (sequence.limit, sequence.cached, sequence.pending, sequence.sample) == (12, 0, 3, 0)
    assert sequence.shape == sequence.tree == TreeSpec.parse("topk:2,3")


def test_it_has_no_slot_until_it_is_given_one(request_of: Make) -> None:
    template = of(request_of, [3])
    fields = {
        name: getattr(template, name) for name in ("params", "sampler", "tree", "detokenizer", "metrics", "limit")
    }
    assert Sequence(index=0, tokens=[3], **fields).slot == -1


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


def test_noise_of_positions_that_are_past_is_forgotten(request_of: Make) -> None:
    sequence = of(request_of, [3, 4], temperature=1.0, seed=5)
    past, next_one = sequence.sampler.noise(1), sequence.sampler.noise(2)
    sequence.emit(6, NONE)
    assert sequence.sampler.noise(2) is next_one, "the next token is chosen at the last position, which is 2"
    assert sequence.sampler.noise(1) is not past


@pytest.mark.parametrize("eos", sorted(EOS))
def test_an_end_token_stops_and_leaves_no_text(request_of: Make, eos: int) -> None:
    sequence = of(request_of, [3, 4])
    sequence.emit(5, EOS)
    assert sequence.finish_reason is None
    sequence.emit(eos, EOS)
    assert (sequence.finish_reason, sequence.output) == ("stop", [5, eos])
    sequence.detokenizer.finish()
    assert sequence.detokenizer.text == "f"


def test_an_end_token_that_is_to_be_ignored_is_a_token(request_of: Make) -> None:
    sequence = of(request_of, [3, 4], ignore_eos=True, max_new_tokens=2)
    sequence.emit(0, EOS)
    assert sequence.finish_reason is None
    sequence.emit(7, EOS)
    assert (sequence.finish_reason, sequence.detokenizer.text) == ("length", "ah")


def test_a_stop_string_stops_where_it_is_complete(request_of: Make) -> None:
    sequence = of(request_of, [3, 4], stop=["fg", "zz"])
    for token in (5, 5):
        sequence.emit(token, NONE)
        assert sequence.finish_reason is None
    assert sequence.detokenizer.text == "f", "what may become a stop string is held back"
    sequence.emit(6, NONE)
    assert (sequence.finish_reason, sequence.detokenizer.text, sequence.output) == ("stop", "f", [5, 5, 6])


def test_a_stop_string_is_looked_for_in_the_output_alone(request_of: Make) -> None:
    sequence = of(request_of, [3, 5], stop=["fg"])
    sequence.emit(6, NONE)
    assert sequence.finish_reason is None


@pytest.mark.parametrize("new", [1, 2, 5])
def test_a_limit_ends_with_its_last_token(request_of: Make, new: int) -> None:
    sequence = of(request_of, [3, 4], max_new_tokens=new)
    for left in range(new - 1, -1, -1):
        assert sequence.finish_reason is None
        sequence.emit(5, NONE)
        assert (sequence.finish_reason == "length") == (left == 0)


def test_what_stops_at_the_limit_has_stopped(request_of: Make) -> None:
    by_token, by_text = of(request_of, [3], max_new_tokens=1), of(request_of, [3], max_new_tokens=1, stop=["f"])
    by_token.emit(0, EOS)
    by_text.emit(5, EOS)
    assert (by_token.finish_reason, by_text.finish_reason) == ("stop", "stop")


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


def test_pending_is_what_the_target_has_not_seen(request_of: Make) -> None:
    sequence = of(request_of, [3, 4, 5, 6])
    sequence.cached = 3
    assert sequence.pending == 1
    sequence.emit(5, NONE)
    sequence.emit(5, NONE)
    assert sequence.pending == 3


def test_it_drafts_between_its_prompt_and_its_last_token(request_of: Make) -> None:
    """Neither while the prompt is read, nor where one token alone is left."""
    sequence = of(request_of, [3, 4, 5], max_new_tokens=3, speculation="chain:4")
    seen = []
    for cached in (0, 1, 2):
        sequence.cached = cached
        seen.append(sequence.drafts)
    assert seen == [False, False, True]
    for token in (5, 5):
        sequence.emit(token, NONE)
        sequence.cached += 1
        seen.append(sequence.drafts)
    assert seen[3:] == [True, False], "two tokens are left, then one"


def test_plain_decoding_never_drafts(request_of: Make) -> None:
    sequence = of(request_of, [3, 4], speculation="off")
    sequence.cached = 1
    assert not sequence.drafts
    sequence.limit_tree(Limits(), 1)
    assert sequence.shape is None


@pytest.mark.parametrize(
    ("limits", "batch", "nodes"),
    [
        (Limits(), 1, 6),
        (Limits(max_draft_tokens=6), 1, 6),
        (Limits(max_draft_tokens=4), 1, 4),
        (Limits(max_draft_tokens=0), 1, None),
        (Limits(num_speculative_tokens_per_batch_size={"1-1": 5, "2-4": 2, "5-8": 0}), 1, 5),
        (Limits(num_speculative_tokens_per_batch_size={"1-1": 5, "2-4": 2, "5-8": 0}), 3, 2),
        (Limits(num_speculative_tokens_per_batch_size={"1-1": 5, "2-4": 2, "5-8": 0}), 5, None),
    ],
)
def test_a_round_s_tree_is_no_larger_than_its_limits(
    request_of: Make, limits: Limits, batch: int, nodes: int | None
) -> None:
    sequence = of(request_of, [3, 4], speculation="topk:2,3")
    sequence.limit_tree(limits, batch)
    assert (sequence.shape and sequence.shape.nodes) == nodes
    assert sequence.tree == TreeSpec.parse("topk:2,3"), "what was asked for stays"
    sequence.limit_tree(Limits(), 1)
    assert sequence.shape == sequence.tree, "each round anew"


def test_a_failure_of_ours_is_kept_as_it_is(request_of: Make) -> None:
    sequence, error = of(request_of, [3]), OptionError("no")
    sequence.fail(error)
    assert sequence.error is error
    assert sequence.finish_reason == "error"


def test_any_other_failure_becomes_one_line_with_its_cause(request_of: Make) -> None:
    sequence, cause = of(request_of, [3]), ValueError("two\n  lines\tand a tab")
    sequence.fail(cause)
    assert isinstance(sequence.error, ExecutionError)
    assert str(sequence.error) == "decoding failed, ValueError: two lines and a tab"
    assert sequence.error.__cause__ is cause


def test_a_failure_replaces_any_other_reason(request_of: Make) -> None:
    sequence = of(request_of, [3], max_new_tokens=1)
    sequence.emit(5, NONE)
    assert sequence.finish_reason == "length"
    sequence.fail(RuntimeError("late"))
    assert (sequence.finish_reason, sequence.output) == ("error", [5])


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
