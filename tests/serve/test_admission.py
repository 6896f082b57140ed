"""Admission: room before anything is read, and how long to wait where there is none."""

from __future__ import annotations

import pytest

from specbuild.serve.admission import Admission
from specbuild.serve.errors import ApiError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_room_is_reserved_and_given_back() -> None:
    admission = Admission(2, 2)
    with admission.room(3):
        assert (admission.samples, admission.requests, admission.idle.is_set()) == (3, 1, False)
        with pytest.raises(ApiError) as refused, admission.room(2):
            pass
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        with admission.room(1):
            assert admission.samples == 4
            assert not admission.idle.is_set()
        assert not admission.idle.is_set(), "one is left"
    assert (admission.samples, admission.requests, admission.idle.is_set()) == (0, 0, True)


def test_what_fails_gives_its_room_back() -> None:
    admission = Admission(1, 1, max_queued_tokens=10)
    with pytest.raises(TypeError), admission.room(1) as ticket:
        ticket.read(None)  # type: ignore[arg-type]
    assert (admission.samples, admission.tokens) == (0, 0)


def test_more_samples_than_the_server_ever_holds_are_no_matter_of_waiting() -> None:
    with pytest.raises(ApiError) as refused, Admission(2, 2).room(5):
        pass
    assert (refused.value.status, refused.value.retry_after) == (400, None)


def test_tokens_wait_until_the_first_chunk() -> None:
    admission = Admission(4, 4, max_queued_tokens=10)
    with admission.room(1) as first, admission.room(1) as second:
        first.read(8)
        with pytest.raises(ApiError) as refused:
            second.read(3)
        assert (refused.value.status, refused.value.code) == (429, "queued_tokens")
        second.read(2)
        first.started()
        assert admission.tokens == 2
        first.started()
        assert admission.tokens == 2
    assert admission.tokens == 0


def test_one_prompt_longer_than_all_that_may_wait_is_taken_alone() -> None:
    with (admission := Admission(1, 1, max_queued_tokens=4)).room(1) as ticket:
        ticket.read(100)
        assert admission.tokens == 100


def test_retry_after_grows_with_what_requests_take() -> None:
    clock = Clock()
    admission = Admission(1, 1, clock=clock)
    assert admission.wait(1) == 1
    for _ in range(40):
        with admission.room(1):
            clock.now += 8
    with admission.room(2):
        assert admission.wait(1) == 8
        assert admission.wait(2) == 16


def test_a_draining_one_takes_nothing() -> None:
    admission = Admission(1, 1)
    admission.draining = True
    with pytest.raises(ApiError) as refused, admission.room(1):
        pass
    assert (refused.value.status, refused.value.code) == (503, "draining")
    assert refused.value.retry_after is not None
