"""The target's choices are the sampler's; what is no number is refused, and a text ends where it should."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from specbuild.runtime.decoding.emission import Emission
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.logprobs import TokenLogprobs
from specbuild.runtime.sampling.sampler import SamplingParams

VOCAB = 12
PROCESSORS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.6, "frequency_penalty": 0.5},
    {"logit_bias": {3: 9.0}, "temperature": 1.2},
]


def row_of(seed: int) -> Any:
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


@pytest.mark.parametrize("processors", PROCESSORS)
def test_a_choice_is_the_samplers(request_of: Any, processors: dict[str, Any]) -> None:
    """At every position, and after every token, which penalties count."""
    params = SamplingParams(max_new_tokens=30, seed=4, speculation="off", **processors)
    mine, other, emission = request_of([1, 2], params), request_of([1, 2], params), Emission(frozenset())
    for position in range(1, 25):
        row = row_of(position)
        token = emission.choose(mine, row.copy(), position)
        assert token == other.sampler.choose(row, position, ())
        mine.emit(token, emission.eos)
        other.emit(token, frozenset())
    assert mine.output == other.output
    assert len(set(mine.output)) > 1 or processors.get("logit_bias")


def test_a_choice_depends_on_its_position(request_of: Any) -> None:
    sequence = request_of([1], SamplingParams(temperature=1.0, speculation="off"))
    emission, row = Emission(frozenset()), np.zeros(VOCAB, dtype=np.float32)
    assert len({emission.choose(sequence, row, position) for position in range(20)}) > 3


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_refused_and_not_noted(request_of: Any, processors: dict[str, Any], wrong: float) -> None:
    sequence = request_of([1, 2], SamplingParams(logprobs=2, speculation="off", **processors))
    row = row_of(1)
    row[7] = wrong
    with pytest.raises(ExecutionError, match=f"the model gave {wrong} as a token's logit: build the bundle") as caught:
        Emission(frozenset()).choose(sequence, row, 1)
    assert "\n" not in str(caught.value)
    assert (sequence.logprobs, sequence.output) == ([], [])


def test_a_choice_among_nothing_is_refused(request_of: Any) -> None:
    sequence = request_of([1, 2], SamplingParams(logprobs=0, speculation="off"))
    with pytest.raises(ExecutionError, match="gave -inf as a token's logit"):
        Emission(frozenset()).choose(sequence, np.full(VOCAB, -np.inf, dtype=np.float32), 1)
    assert sequence.logprobs == []


@pytest.mark.parametrize("token", [0, 11])
def test_only_the_chosen_tokens_logit_has_to_be_finite(request_of: Any, token: int) -> None:
    """A model may rule tokens out."""
    sequence = request_of([1, 2], SamplingParams(speculation="off"))
    row = np.full(VOCAB, -np.inf, dtype=np.float32)
    row[token] = -3.0
    assert Emission(frozenset()).choose(sequence, row, 1) == token


@pytest.mark.parametrize("count", [0, 1, 3, VOCAB])
def test_log_probabilities_are_the_rows_own(request_of: Any, count: int) -> None:
    """Of the model's logits before any processor, for each token that is chosen."""
    params = SamplingParams(logprobs=count, temperature=1.3, repetition_penalty=1.5, speculation="off")
    sequence, emission = request_of([1, 2], params), Emission(frozenset())
    rows = [row_of(seed) for seed in range(6)]
    tokens = [emission.choose(sequence, row, position) for position, row in enumerate(rows, 1)]
    assert sequence.logprobs == [TokenLogprobs.of(row, t, count) for row, t in zip(rows, tokens, strict=True)]
    for told, row in zip(sequence.logprobs, rows, strict=True):
        assert told.logprob == pytest.approx(row[told.token_id] - np.log(np.exp(row.astype(np.float64)).sum()))
        assert len(told.top) == count


def test_none_are_noted_where_nobody_asks(request_of: Any) -> None:
    sequence = request_of([1, 2], SamplingParams(speculation="off"))
    Emission(frozenset()).choose(sequence, row_of(0), 1)
    Emission(frozenset()).note(sequence, row_of(0), 3)
    assert sequence.logprobs == []


@pytest.mark.parametrize(
    ("ignore_eos", "reasons"),
    [(False, [None, "stop"]), (True, [None, None, None, "length"])],
)
def test_a_text_ends_with_its_eos_or_its_length(request_of: Any, ignore_eos: bool, reasons: list[str | None]) -> None:
    params = SamplingParams(max_new_tokens=4, speculation="off", ignore_eos=ignore_eos)
    sequence: Sequence = request_of([4, 5], params)
    emission, found = Emission(frozenset({4, 9})), list[str | None]()
    for token in (3, 9, 4, 6):
        sequence.emit(token, emission.eos)
        found.append(sequence.finish_reason)
        if sequence.finish_reason:
            break
    assert found == reasons
    assert sequence.tokens == [4, 5, 3, 9, 4, 6][: 2 + len(found)], "the token that ends a text is in its output"
