"""What both loops hold: options, a round's account, failures that stay alone, and siblings for measuring."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_requests import Made, prompt_of, run
from device_requests import request_of as device_request
from tiny_models import CHUNK

from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.decoding.loop import DEFAULTS, LoopOptions, accounted, alone, cache_bytes
from specbuild.runtime.decoding.planner import Planner
from specbuild.runtime.drafting.habits import Common, Habits
from specbuild.runtime.drafting.lookup_first import LookupDrafter
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.errors import ExecutionError, OptionError, PromptError
from specbuild.runtime.requests.metrics import RunStats
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits
from specbuild.runtime.speculation.lead import LEEWAY, MOST_LOST

PROMPT = [1, 2, 3, 4, 5, 6, 7]
DRAFTING = SamplingParams(max_new_tokens=12, speculation="chain:3")
COMMON = Common(np.array([1]), np.array([2]))


def test_options_by_default() -> None:
    assert (LoopOptions().limits, LoopOptions().prefix_caching, LoopOptions().lone_chunk) == (NO_LIMITS, True, None)
    assert LoopOptions() == DEFAULTS
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULTS.prefix_caching = False  # type: ignore[misc]


def test_options_are_heeded(hash_model: Any, hash_executor: Any, request_of: Any) -> None:
    limits = Limits(max_draft_tokens=1)
    loop = HostLoop(hash_executor(hash_model()), None, 4, frozenset(), LoopOptions(limits, False, 6))
    assert loop.planner.limits is limits
    with pytest.raises(OptionError, match="max_draft_tokens allows 1"):
        loop.check(request_of(PROMPT, DRAFTING))
    sequence = request_of(PROMPT, SamplingParams(max_new_tokens=2, speculation="off"))
    loop.round([sequence])
    assert sequence.cached == 6, "alone"
    assert loop.cached_tokens() == (0,), "no prefix is kept"


class Fake:
    """As much of a loop as a round's account needs."""

    def __init__(self, drafts: bool = True) -> None:
        self.live, self.tally, self.exactness, self.planner = None, RunStats(), None, Planner()
        self.target = SimpleNamespace(seconds=10.0, cache_bytes=600, batch_size=2, buckets=None)
        self.draft_executor = SimpleNamespace(seconds=20.0, cache_bytes=70) if drafts else None

    @property
    def stats(self) -> RunStats:
        return copy(self.tally)


@pytest.mark.parametrize("drafts", [True, False])
def test_a_round_is_accounted(request_of: Any, drafts: bool) -> None:
    """What the models took in it, and what was emitted in it, by all of its sequences."""
    loop: Any = Fake(drafts)
    sequences = [request_of([1], DRAFTING, slot=slot) for slot in range(2)]
    sequences[0].emit(3, frozenset())
    for number in (1, 2):
        before = loop.stats
        with accounted(loop, sequences):
            time.sleep(0.01)
            loop.target.seconds += 2.0
            if loop.draft_executor:
                loop.draft_executor.seconds += 0.5
            for token in (4, 5):
                sequences[1].emit(token, frozenset())
            sequences[0].emit(6, frozenset())
        stats = loop.stats
        assert before.rounds == number - 1, "statistics that were read do not change"
        assert (stats.rounds, stats.emitted, stats.verify) == (number, 3 * number, 2.0 * number)
        assert stats.draft == (0.5 * number if drafts else 0.0)
        assert 0.01 * number <= stats.total < 5


class Live:
    """A table by which plain decoding takes two seconds a round and one more for each row."""

    on = True
    said = took = 0.0

    def at(self, batch: int, temperature: float) -> Live:
        return self

    def of_round(self, rows: int, sequences: int, drafts: bool) -> float:
        return 2.0 + rows

    def skip(self) -> None:
        pass


def seconds(sequences: list[Any]) -> list[tuple[float, float]]:
    return [(s.metrics.busy_time, s.metrics.plain_time) for s in sequences]


def a_round(loop: Any, sequences: list[Sequence], clock: list[float], work: Callable[[], None]) -> None:
    """Of eight seconds."""
    with accounted(loop, sequences):
        clock[0] += 8.0
        work()


def test_a_rounds_seconds_are_shared_by_rows(request_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding's too: what drafted nothing took just that, what drafted would have taken a round a token."""
    loop, clock = Fake(), [0.0]
    loop.live = Live()  # type: ignore[assignment]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    reads, drafts = request_of([1, 2, 3, 4, 5, 6], DRAFTING, slot=0), request_of([1], DRAFTING, slot=1)

    def read_and_draft() -> None:
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

    def both_draft() -> None:
        reads.metrics.speculative_decoding.record(1, 0)
        drafts.metrics.speculative_decoding.record(5, 1)
        for sequence, tokens in ((reads, (1,)), (drafts, (1, 2))):
            for token in tokens:
                sequence.emit(token, frozenset())

    a_round(loop, [reads, drafts], clock, both_draft)
    assert seconds([reads, drafts]) == [(10.0, 10.0), (14.0, 15.0)]
    assert sum(s.metrics.busy_time for s in (reads, drafts)) == loop.stats.total == 24.0


def test_how_far_a_sequence_is_ahead_of_plain_decoding(request_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tokens, in rounds with drafts: two decode plainly in 2 + 2 seconds, and rounds take 8."""
    loop, clock = Fake(), [0.0]
    loop.live = Live()  # type: ignore[assignment]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    fast, slow = request_of([1], DRAFTING, slot=0), request_of([1], DRAFTING, slot=1)

    def draft() -> None:
        fast.metrics.speculative_decoding.record(3, 2)
        for sequence, count in ((fast, 3), (slow, 1)):
            for token in range(count):
                sequence.emit(token, frozenset())

    a_round(loop, [fast, slow], clock, draft)
    assert (fast.lead, slow.lead) == pytest.approx((LEEWAY + 3 - 2, LEEWAY + 1 - 2))
    a_round(loop, [fast, slow], clock, lambda: [s.emit(1, frozenset()) for s in (fast, slow)] and None)
    assert slow.lead == pytest.approx(2 * LEEWAY - 1), "nothing was drafted: it is as fast as plain decoding"
    slow.policy = object()  # type: ignore[assignment]
    slow.shape = None
    a_round(loop, [fast, slow], clock, lambda: [s.emit(1, frozenset()) for s in (fast, slow)] and None)
    assert slow.lead == pytest.approx(3 * LEEWAY - 1), "its policy rested"
    slow.shape = slow.tree
    a_round(loop, [fast, slow], clock, lambda: [s.emit(1, frozenset()) for s in (fast, slow)] and None)
    assert slow.lead == pytest.approx(4 * LEEWAY - 2), "its policy decided, which took as long"
    was = slow.lead
    with monkeypatch.context() as patch:
        patch.setattr(Live, "of_round", lambda *args, drafts: 0.01)
        a_round(loop, [fast, slow], clock, draft)
    assert slow.lead == pytest.approx(was + LEEWAY - MOST_LOST), "what takes so long is no draft's fault"
    monkeypatch.setattr(Live, "on", False)
    a_round(loop, [fast, slow], clock, draft)
    assert slow.lead == pytest.approx(was + 2 * LEEWAY - MOST_LOST), (
        "a table that nobody corrects says nothing of this machine"
    )


def test_plain_decoding_reads_the_prompts_beside_it_too(request_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds take 8 seconds, without the draft's three rows 2 + 4."""
    loop, clock = Fake(), [0.0]
    loop.live = Live()  # type: ignore[assignment]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    fast, reads = request_of([1], DRAFTING, slot=0), request_of([1, 2, 3, 4], DRAFTING, slot=1)
    reads.cached = 0
    a_round(loop, [fast, reads], clock, lambda: None)
    assert (fast.lead, reads.lead) == (LEEWAY, 0), "nothing was drafted, and the other one does not decode yet"

    def draft() -> None:
        fast.metrics.speculative_decoding.record(3, 2)
        reads.cached += 3
        for token in (1, 2, 3):
            fast.emit(token, frozenset())

    a_round(loop, [fast, reads], clock, draft)
    assert fast.lead == pytest.approx(LEEWAY + LEEWAY + 3 - 8 / 6)


@pytest.mark.parametrize(("on_host", "decides", "told"), [(True, True, 0.0), (True, False, 8.0), (False, True, 8.0)])
def test_deciding_is_no_part_of_plain_decoding(
    request_of: Any, monkeypatch: pytest.MonkeyPatch, on_host: bool, decides: bool, told: float
) -> None:
    """A host's round in which a policy decided and drafted nothing says nothing of the loop's own time."""
    loop, sequence, clock, heard = Fake(), request_of([1], DRAFTING), [0.0], []
    sequence.policy = SimpleNamespace(now=SimpleNamespace(levels=0))
    sequence.shape = sequence.tree if decides else None
    loop.planner, loop.live = Planner(on_host=on_host), Live()  # type: ignore[assignment]
    monkeypatch.setattr(Live, "round", lambda self, own, *rest: heard.append(own), raising=False)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    with accounted(loop, [sequence]) as account:  # type: ignore[arg-type]
        clock[0], account.decoded = 8.0, 0
        sequence.emit(4, frozenset())
    assert heard == [told]


def test_without_a_table_nobody_knows_what_plain_decoding_takes(request_of: Any) -> None:
    sequence = request_of([1], DRAFTING)
    with accounted(Fake(), [sequence]):  # type: ignore[arg-type]
        sequence.emit(4, frozenset())
    assert sequence.metrics.plain_time == sequence.metrics.busy_time > 0
    with accounted(Fake(), [sequence]):  # type: ignore[arg-type]
        sequence.metrics.speculative_decoding.record(3, 1)
    assert math.isnan(sequence.metrics.plain_time)


def test_who_drafts_in_the_round_that_it_enters_in_decodes(request_of: Any) -> None:
    """Its prompt was in a cache, so nothing was read before."""
    loop, sequence = Fake(), request_of([1, 2, 3], DRAFTING)
    loop.live = Live()  # type: ignore[assignment]
    with accounted(loop, [sequence]):  # type: ignore[arg-type]
        assert not sequence.decodes
        sequence.cached = 2
        sequence.metrics.speculative_decoding.record(3, 1)
        for token in (4, 5):
            sequence.emit(token, frozenset())
    assert sequence.metrics.plain_time == 2 * 3.0


def test_rows_that_a_cache_had_are_not_read(request_of: Any) -> None:
    loop: Any = Fake()
    cold, warm = request_of([*range(9)], DRAFTING, slot=0), request_of([*range(9)], DRAFTING, slot=1)
    with accounted(loop, [cold, warm]):
        cold.cached, warm.cached, warm.metrics.num_cached_tokens = 6, 8, 6
    assert cold.metrics.busy_time == pytest.approx(3 * warm.metrics.busy_time)


def test_requests_add_up_to_what_the_loop_was_busy(host_loop: Any, request_of: Any) -> None:
    loop = host_loop()
    done = [finish(loop, request_of([*PROMPT[turn:], turn], DRAFTING)) for turn in range(4)]
    assert sum(s.metrics.busy_time for s in done) == pytest.approx(loop.stats.total, rel=1e-9)


def test_what_a_round_adds_itself_is_kept(request_of: Any) -> None:
    loop: Any = Fake()
    with accounted(loop, []):
        loop.tally.accept += 0.25
        loop.tally.commit += 0.5
    assert (loop.stats.rounds, loop.stats.emitted, loop.stats.accept, loop.stats.commit) == (1, 0, 0.25, 0.5)


def test_caches_are_counted_together(hash_model: Any, hash_executor: Any) -> None:
    both: Any = Fake()
    one: Any = Fake(drafts=False)
    assert [cache_bytes(both), cache_bytes(one)] == [670, 600]
    target, draft = hash_executor(hash_model()), hash_executor(hash_model())
    assert HostLoop(target, ModelDrafter(draft, 8), 8, frozenset()).cache_bytes == 0


class Panic(BaseException):
    """As a tokenizer's, which is no Exception."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("a\n bug"), "decoding failed, ValueError: a bug"),
        (KeyError("k"), "decoding failed, KeyError: 'k'"),
        (Panic("called `unwrap`"), "decoding failed, Panic: called `unwrap`"),
    ],
)
def test_what_is_raised_ends_the_sequence(request_of: Any, error: BaseException, message: str) -> None:
    sequence = request_of([1], DRAFTING)
    with alone(sequence):
        raise error
    assert (sequence.finish_reason, type(sequence.error), str(sequence.error)) == ("error", ExecutionError, message)
    assert sequence.error.__cause__ is error


def test_what_is_raised_on_purpose_stays_what_it_is(request_of: Any) -> None:
    sequence, error = request_of([1], DRAFTING), PromptError("not this one")
    with alone(sequence):
        raise error
    assert sequence.error is error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_goes_through(request_of: Any, error: type[BaseException]) -> None:
    sequence = request_of([1], DRAFTING)
    with pytest.raises(error), alone(sequence):
        raise error
    assert (sequence.finish_reason, sequence.error) == (None, None)


def test_where_nothing_is_raised_nothing_ends(request_of: Any) -> None:
    sequence = request_of([1], DRAFTING)
    with alone(sequence):
        pass
    assert (sequence.finish_reason, sequence.error) == (None, None)


def finish(loop: HostLoop, sequence: Sequence) -> Sequence:
    """In the first slot, until it ends."""
    sequence.slot = 0
    while not sequence.finish_reason:
        loop.round([sequence])
    loop.release(0)
    return sequence


@pytest.fixture
def host_loop(hash_model: Any, hash_executor: Any) -> Callable[..., HostLoop]:
    """`host_loop(drafts)`: a loop of hash models that keeps no prefixes, as measuring wants it."""

    def make(drafts: bool = True) -> HostLoop:
        target, draft = hash_executor(hash_model(1)), hash_executor(hash_model(1, error=0.2))
        drafter = LookupDrafter(ModelDrafter(draft, 8) if drafts else None, habits=Habits(COMMON))
        return HostLoop(target, drafter, 8, frozenset(), LoopOptions(Limits(max_draft_tokens=5), False, 16))

    return make


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_hosts_sibling(
    hash_model: Any, request_of: Any, plain: Any, host_loop: Any, drafts: bool, looks_up: bool, overlap: bool
) -> None:
    """The same models, limits and tokens, and statistics and a drafter of its own; they take turns."""
    loop = host_loop(drafts)
    sibling = loop.sibling(looks_up, overlap)
    assert isinstance(sibling.drafter, LookupDrafter)
    assert (sibling.target, sibling.draft_executor) == (loop.target, loop.draft_executor)
    assert (sibling.reader.chunk, sibling.emission.eos) == (loop.reader.chunk, loop.emission.eos)
    assert sibling.planner.limits is loop.planner.limits
    assert sibling.drafter is not loop.drafter
    assert sibling.drafter.texts.habits.common is COMMON
    assert isinstance(loop.drafter, LookupDrafter)
    assert sibling.drafter.texts.habits is not loop.drafter.texts.habits  # what it learns is its own
    if drafts:
        assert sibling.drafter.model
        assert (sibling.drafter.model._thread is not None) == overlap
    for turn, each in enumerate((loop, sibling, loop, sibling)):
        prompt, before = [*PROMPT[turn % 2 :], turn], (loop.stats, sibling.stats)
        assert finish(each, request_of(prompt, DRAFTING)).output == plain(hash_model(1), prompt, DRAFTING)
        added = [now.since(then).emitted for now, then in zip((loop.stats, sibling.stats), before, strict=True)]
        assert added == ([12, 0] if each is loop else [0, 12])
    sibling.close()


def test_a_hosts_sibling_keeps_no_prefixes_where_the_loop_does_not(host_loop: Any, request_of: Any) -> None:
    sibling = host_loop().sibling()
    done = [finish(sibling, request_of(PROMPT, DRAFTING)) for _ in range(2)]
    assert [s.metrics.num_cached_tokens for s in done] == [0, 0]


@pytest.mark.parametrize("looks_up", [False, True])
def test_a_sibling_may_leave_all_to_the_model(host_loop: Any, request_of: Any, looks_up: bool) -> None:
    sibling = host_loop().sibling(looks_up)
    sequence = request_of([5, 6, 7, 8] * 6, DRAFTING)
    sequence.cached = 23
    (tree,) = sibling.drafter.propose([sequence])
    assert (tree.tokens == [8, 5, 6, 7]) == looks_up
    assert (sibling.draft_executor.seconds == 0) == looks_up


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hosts_fresh_drafter_knows_of_no_text(host_loop: Any, request_of: Any, overlap: bool) -> None:
    loop = host_loop()
    finish(loop, request_of(PROMPT, DRAFTING))
    known, fresh = loop.drafter.model, loop.fresh_drafter(overlap)
    assert isinstance(fresh, ModelDrafter)
    assert fresh is not known
    assert fresh.executor is loop.draft_executor
    assert known.cached[0] > 0
    assert fresh.cached == [0]
    assert (fresh._thread is not None) == overlap
    sequence = request_of(PROMPT, DRAFTING)
    sequence.cached = len(PROMPT) - 1
    first, again = (loop.fresh_drafter().propose([sequence]) for _ in range(2))
    assert [tree.tokens for tree in first] == [tree.tokens for tree in again]
    assert len(first[0]) == 4


def test_where_no_model_drafts_there_is_no_drafter(host_loop: Any, hash_model: Any, hash_executor: Any) -> None:
    assert host_loop(drafts=False).fresh_drafter() is None
    assert HostLoop(hash_executor(hash_model()), None, 8, frozenset()).fresh_drafter() is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def wanted(tree: str = "chain:3") -> list[Sequence]:
    """Two texts, one of which is sampled."""
    return [
        device_request(prompt_of(i, 6 + i), speculation=tree, temperature=0.8 * i, max_new_tokens=10) for i in range(2)
    ]


def test_a_devices_sibling(host: KernelLibrary, folder: Path) -> None:
    """The same models, memory and graphs; it counts its own rounds, and they take turns."""
    made = Made(host, folder, drafter=None)
    expected = [s.output for s in run(made.loop, wanted())]
    first = made.loop.stats
    sibling = made.loop.sibling(looks_up=False)
    assert (sibling.target, sibling.draft_executor) == (made.loop.target, made.loop.draft_executor)
    assert sibling.rounds is made.loop.rounds
    assert sibling.stats == RunStats()
    assert [s.output for s in run(sibling, wanted())] == expected
    captured = made.device.captured
    assert (made.loop.stats, sibling.stats.emitted) == (first, 20)
    assert [s.output for s in run(made.loop, wanted())] == expected
    assert (made.loop.stats.emitted, sibling.stats.emitted) == (40, 20)
    assert made.device.captured == captured


def test_a_devices_sibling_may_leave_all_to_the_model(host: KernelLibrary, folder: Path) -> None:
    """As the loop itself does or does not."""
    sequence = device_request([17, 4, 29, 61] * 5, speculation="chain:3")
    sequence.slot, sequence.cached = 0, 19
    for drafter in (None, "model"):
        loop = Made(host, folder, drafter=drafter).loop
        found = {each: loop.sibling(looks_up=each).proposals.plan([sequence])[0].tree for each in (True, False)}
        assert found[True]
        assert found[True].tokens == [61, 17, 4, 29]
        assert found[False] is None
        (own,) = loop.proposals.plan([sequence])
        assert (own.tree is None) == (drafter == "model"), "a sibling changes nothing of it"


def test_a_device_does_not_overlap(host: KernelLibrary, folder: Path) -> None:
    with pytest.raises(OptionError, match="does not draft while it verifies") as caught:
        Made(host, folder).loop.sibling(overlap=True)
    assert "\n" not in str(caught.value)


def test_a_devices_fresh_drafter_is_the_hosts_over_its_draft(host: KernelLibrary, folder: Path) -> None:
    """It drafts what the host would with the same model."""
    made = Made(host, folder)
    fresh = made.loop.fresh_drafter()
    assert isinstance(fresh, ModelDrafter)
    assert fresh.executor is made.loop.draft_executor
    assert fresh._chunk == made.loop.reader.chunk == CHUNK
    assert fresh.cached == [0, 0]
    sequence = wanted()[0]
    sequence.slot, sequence.cached = 0, 5
    (tree,) = fresh.propose([sequence])
    loop = HostLoop(made.target, LookupDrafter(ModelDrafter(fresh.executor, 8), looks_up=False), 8, frozenset())
    assert loop.draft([sequence])[0].tokens == tree.tokens
    assert len(tree) == 4
    assert Made(host, folder, names=("target",)).loop.fresh_drafter() is None


def test_a_devices_caches_are_counted_together(host: KernelLibrary, folder: Path) -> None:
    both, one = Made(host, folder), Made(host, folder, names=("target",))
    assert both.loop.draft_executor
    assert both.loop.cache_bytes == both.target.cache_bytes + both.loop.draft_executor.cache_bytes
    assert one.loop.cache_bytes == one.target.cache_bytes > 0


def test_a_sibling_leaves_no_prefix_that_is_none(
    hash_model: Any, hash_executor: Any, request_of: Any, plain: Any
) -> None:
    """Loops over the same caches in turns: what one has written is not what the other remembers."""
    model, params = hash_model(1), SamplingParams(max_new_tokens=8, speculation="off")
    loop = HostLoop(hash_executor(model), None, 8, frozenset())
    sibling = loop.sibling()
    first, second = [1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0]
    for prompt, by in ((first, loop), (second, sibling), (first, loop)):
        sequence = request_of(prompt, params)
        sequence.slot = by.pick(sequence, [0])
        while not sequence.finish_reason:
            by.round([sequence])
        by.release(0)
        assert sequence.output == plain(model, prompt, params)
