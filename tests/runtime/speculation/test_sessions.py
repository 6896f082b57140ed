"""Sessions: who shares what, how many are kept and for how long, and callers beside the worker."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from specbuild.runtime.speculation.sessions import Sessions


def failing(session, source="model"):
    for _ in range(40):
        session.record(source, 0, [0.8])
    return session


def test_requests_of_one_name_have_one_session_greedy_and_sampled_ones_apart(clock):
    """And one without a name has its own."""
    sessions = Sessions(clock)
    first = sessions.of("a", sampled=False)
    assert sessions.of("a", sampled=False) is first
    for other in (("a", True), ("b", False), (None, False)):
        assert sessions.of(*other) is not first


@pytest.mark.parametrize("source", ["model", "lookup"])
def test_a_session_begins_with_what_all_have_seen(clock, source):
    """Of one drafter each, greedy and sampled ones apart."""
    sessions = Sessions(clock)
    fresh = {each: fared.ratio for each, fared in sessions.of(None, sampled=False).drafters.items()}
    failing(sessions.of(None, sampled=True), source)
    for _ in range(40):
        sessions.of(None, sampled=False).record(source, 1, [0.5])
    for name in (None, "a"):
        drafters = sessions.of(name, sampled=True).drafters
        assert drafters[source].ratio < 0.5
        assert {each: fared.ratio for each, fared in drafters.items() if each != source} == {
            each: ratio for each, ratio in fresh.items() if each != source
        }
        assert sessions.of(name, sampled=False).drafters[source].ratio > 1.5


def test_the_one_asked_for_longest_ago_is_forgotten_first(clock):
    sessions = Sessions(clock)
    first, second = (sessions.of(name, sampled=False) for name in ("first", "second"))
    for number in range(5000):
        sessions.of(str(number), sampled=False)
        assert sessions.of("first", sampled=False) is first
    assert sessions.of("second", sampled=False) is not second


def test_a_session_is_forgotten_after_an_hour_without_a_request(clock):
    sessions = Sessions(clock)
    first, other = sessions.of("a", sampled=False), sessions.of("b", sampled=False)
    clock.now = 3599.0
    assert sessions.of("a", sampled=False) is first
    clock.now = 3600.0
    assert sessions.of("b", sampled=False) is not other
    assert sessions.of("a", sampled=False) is first


def test_what_all_know_is_written_by_one_thread_and_read_by_others(clock):
    """What was read in the middle of a record would be above what was ever seen."""
    sessions, over, seen = Sessions(clock), threading.Event(), list[float]()
    worker = sessions.of("a", sampled=False)

    def begin():
        while not over.is_set():
            seen.append(sessions.of(None, sampled=False).drafters["model"].ratio)

    readers = [threading.Thread(target=begin) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(3000):
        worker.record("model", 1, [0.9])
        worker.record("model", 0, [0.9])
    over.set()
    for reader in readers:
        reader.join()
    assert max(seen) <= 1.2
    assert min(seen) > 0.3


def test_callers_in_many_threads_share_one_session(clock):
    sessions = Sessions(clock)
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda number: sessions.of(str(number // 8), sampled=True), range(400))]
    assert len({id(session) for session in found}) == 50
