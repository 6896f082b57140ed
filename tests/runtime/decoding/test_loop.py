"""What both loops share: a round's account, and failures that stay alone."""

import math
import time
from types import SimpleNamespace

import pytest
from hash_models import sequence_of

from specbuild.runtime.decoding.accounting import account
from specbuild.runtime.decoding.error_isolation import isolate
from specbuild.runtime.errors import ExecutionError, PromptError
from specbuild.runtime.requests.metrics import RunStats
from specbuild.runtime.sampling.sampler import SamplingParams

DRAFTING = SamplingParams(max_new_tokens=12, speculation="chain:3")


class Fake:
    """As much of a loop as a round's account needs."""

    def __init__(self, cost=None):
        self.cost, self.tally = cost, RunStats()
        self.target = SimpleNamespace(seconds=10.0)
        self.draft_executor = None


class Cost:
    """Prices by which plain decoding takes two seconds a round and one more for each sequence."""

    def of_round(self, sequences, sampled):
        return SimpleNamespace(plain=2.0 + sequences)


def seconds(sequences):
    return [(s.metrics.busy_time, s.metrics.plain_time) for s in sequences]


def a_round(loop, sequences, clock, work):
    """Of eight seconds."""
    with account(loop, sequences):
        clock[0] += 8.0
        work()


def test_a_rounds_seconds_are_shared_by_rows(monkeypatch):
    """Plain decoding's too: what drafted nothing took just that, what drafted would have taken a round a token."""
    loop, clock = Fake(Cost()), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    reads, drafts = sequence_of([1, 2, 3, 4, 5, 6], DRAFTING, slot=0), sequence_of([1], DRAFTING, slot=1)

    def read_and_draft():
        reads.cached += 4
        drafts.metrics.speculative_decoding.record(3, 2)
        for token in (4, 5, 6):
            drafts.emit(token, frozenset())

    reads.cached = reads.metrics.num_cached_tokens = 0
    a_round(loop, [reads, drafts], clock, read_and_draft)
    # one of eight rows is a second; one sequence alone decodes: three seconds a token
    assert seconds([reads, drafts]) == [(4.0, 4.0), (4.0, 1.0 + 2 * 3.0)]

    reads.cached = 5
    reads.emit(7, frozenset())
    a_round(loop, [reads, drafts], clock, lambda: [s.emit(8, frozenset()) for s in (reads, drafts)] and None)
    assert seconds([reads, drafts]) == [(8.0, 8.0), (8.0, 11.0)], "nothing was drafted"

    def both_draft():
        reads.metrics.speculative_decoding.record(1, 0)
        drafts.metrics.speculative_decoding.record(5, 1)
        for sequence, tokens in ((reads, (1,)), (drafts, (1, 2))):
            for token in tokens:
                sequence.emit(token, frozenset())

    a_round(loop, [reads, drafts], clock, both_draft)
    assert seconds([reads, drafts]) == [(10.0, 10.0), (14.0, 15.0)]
    assert sum(s.metrics.busy_time for s in (reads, drafts)) == loop.tally.total == 24.0


def test_without_a_table_nobody_knows_what_plain_decoding_takes():
    sequence = sequence_of([1], DRAFTING)
    with account(Fake(), [sequence]):
        sequence.emit(4, frozenset())
    assert sequence.metrics.plain_time == sequence.metrics.busy_time > 0
    with account(Fake(), [sequence]):
        sequence.metrics.speculative_decoding.record(3, 1)
    assert math.isnan(sequence.metrics.plain_time)


def test_who_drafts_in_the_round_that_it_enters_in_decodes():
    """Its prompt was in a cache, so nothing was read before."""
    sequence = sequence_of([1, 2, 3], DRAFTING)
    with account(Fake(Cost()), [sequence]):
        assert not sequence.decodes
        sequence.cached = 2
        sequence.metrics.speculative_decoding.record(3, 1)
        for token in (4, 5):
            sequence.emit(token, frozenset())
    assert sequence.metrics.plain_time == 2 * 3.0


def test_rows_that_a_cache_had_are_not_read():
    loop = Fake()
    cold, warm = sequence_of([*range(9)], DRAFTING, slot=0), sequence_of([*range(9)], DRAFTING, slot=1)
    with account(loop, [cold, warm]):
        cold.cached, warm.cached, warm.metrics.num_cached_tokens = 6, 8, 6
    assert cold.metrics.busy_time == pytest.approx(3 * warm.metrics.busy_time)


class Panic(BaseException):
    """As a tokenizer's, which is no Exception."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("a\n bug"), "decoding failed, ValueError: a bug"),
        (KeyError("k"), "decoding failed, KeyError: 'k'"),
        (Panic("called `unwrap`"), "decoding failed, Panic: called `unwrap`"),
        (PromptError("not this one"), "not this one"),
    ],
)
def test_what_is_raised_ends_the_sequence(error, message):
    """What is raised on purpose stays what it is."""
    sequence = sequence_of([1], DRAFTING)
    isolate(sequence, error)
    assert (sequence.finish_reason, str(sequence.error)) == ("error", message)
    if isinstance(error, PromptError):
        assert sequence.error is error
    else:
        assert isinstance(sequence.error, ExecutionError)
        assert sequence.error.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_goes_through(error):
    sequence = sequence_of([1], DRAFTING)
    with pytest.raises(error):
        isolate(sequence, error())
    assert (sequence.finish_reason, sequence.error) == (None, None)
