"""Sessions: who shares what, how many are kept and for how long, and callers beside the worker."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from specbuild.runtime.speculation.sessions import (
    MAX_AGE,
    MAX_SESSIONS,
    PRIORS,
    PROBES,
    Probing,
    Session,
    Sessions,
    Shared,
    Source,
)
from specbuild.runtime.speculation.trust import CAUTION


def test_requests_of_one_name_have_one_session_greedy_and_sampled_ones_apart(clock: Any) -> None:
    sessions = Sessions(clock)
    first = sessions.of("a", sampled=False)
    assert sessions.of("a", sampled=False) is first
    others = [sessions.of("a", sampled=True), sessions.of("b", sampled=False), sessions.of(None, sampled=False)]
    assert all(other is not first for other in others)
    assert [other.shared is first.shared for other in others] == [False, True, True]
    assert len(sessions._entries) == 2


def test_a_request_without_a_session_has_its_own_trust_and_the_engine_s_probing(clock: Any) -> None:
    sessions = Sessions(clock)
    one, other = (sessions.of(None, sampled=False) for _ in range(2))
    assert one.trusts["model"] is not other.trusts["model"]
    assert one.trusts["lookup"] is not other.trusts["lookup"]
    assert one.probing is other.probing is one.shared.probing
    assert len(sessions._entries) == 0


def test_a_session_begins_with_what_all_have_seen_and_probes_by_itself(clock: Any) -> None:
    sessions = Sessions(clock)
    before = sessions.of(None, sampled=False)
    for _ in range(20):
        before.record("model", 0, [0.8])
    before.probing.probed(0)
    named = sessions.of("a", sampled=False)
    assert named.trusts["model"].ratio == pytest.approx(before.shared.trust("model").ratio)
    assert named.trusts["model"].ratio < CAUTION / 2
    assert (named.probing.rest, named.probing.wait) == (PROBES[0], 2 * PROBES[0])
    named.probing.probed(1)
    assert named.probing is not before.probing
    assert before.probing.rest == PROBES[0]


@pytest.mark.parametrize("source", ["lookup", "habit"])
def test_a_request_begins_with_the_trust_that_texts_have_earned(clock: Any, source: Source) -> None:
    """Of one kind each, greedy and sampled ones apart; and never with more than calibration saw."""
    sessions = Sessions(clock)
    for _ in range(40):
        sessions.of(None, sampled=True).record(source, 0, [0.5])
        sessions.of(None, sampled=False).record(source, 1, [0.5])
    asked = sessions.of(None, sampled=True)
    assert asked.trusts[source].ratio < 0.3
    assert [asked.trusts[other].ratio for other in PRIORS if other != source] == [
        ratio for other, (_, ratio) in PRIORS.items() if other != source
    ]
    assert sessions.of(None, sampled=False).trusts[source].ratio == 1.0


def test_the_one_asked_for_longest_ago_is_forgotten_first(clock: Any) -> None:
    sessions = Sessions(clock)
    kept = [sessions.of(str(number), sampled=False) for number in range(MAX_SESSIONS)]
    assert sessions.of("0", sampled=False) is kept[0]
    sessions.of("one more", sampled=False)
    assert len(sessions._entries) == MAX_SESSIONS
    assert sessions.of("0", sampled=False) is kept[0]
    assert sessions.of("1", sampled=False) is not kept[1]


def test_a_session_is_forgotten_after_an_hour_without_a_request(clock: Any) -> None:
    sessions = Sessions(clock)
    first, other = sessions.of("a", sampled=False), sessions.of("b", sampled=False)
    clock.now = MAX_AGE - 1
    assert sessions.of("a", sampled=False) is first
    clock.now = MAX_AGE
    assert sessions.of("b", sampled=False) is not other
    clock.now = 2 * MAX_AGE - 2
    assert sessions.of("a", sampled=False) is first
    clock.now = 4 * MAX_AGE
    assert sessions.of("c", sampled=False)
    assert len(sessions._entries) == 1


def test_a_draft_that_fails_rests_longer_each_time() -> None:
    probing, waited = Probing(), list[int]()
    for _ in range(7):
        rounds = 1
        while not probing.due():
            rounds += 1
        waited.append(rounds)
        probing.probed(0)
    assert waited == [1, 17, 33, 65, 129, 257, 257]
    probing.probed(1)
    assert probing.due(), "what came true is tried again at once"


def test_what_all_know_is_written_by_one_thread_and_read_by_others() -> None:
    """A trust that was read in the middle of a record would be above what was ever seen."""
    shared, over, seen = Shared(), threading.Event(), list[float]()
    worker = Session(shared, shared.probing)

    def begin() -> None:
        while not over.is_set():
            seen.append(shared.trust("model").ratio)

    readers = [threading.Thread(target=begin) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(3000):
        worker.record("model", 1, [0.9])
        worker.record("model", 0, [0.9])
    over.set()
    for reader in readers:
        reader.join()
    assert max(seen) <= 1.0
    assert min(seen) > 0.3


def test_callers_in_many_threads_share_one_session(clock: Any) -> None:
    sessions, found, ready = Sessions(clock), list[Session](), threading.Barrier(8)

    def ask() -> None:
        ready.wait()
        found.extend(sessions.of(str(number), sampled=True) for number in range(50))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(session) for session in found}) == 50
