"""Admission: room before anything is read, and how long to wait where there is none."""

import pytest

from specbuild.serve.errors import ApiError
from specbuild.serve.request.admission import Admission


def test_what_fails_gives_its_room_back():
    admission = Admission(1, 1, max_queued_tokens=10)
    with pytest.raises(TypeError), admission.room(1) as ticket:
        ticket.read(None)
    assert (admission.samples, admission.tokens) == (0, 0)


def test_tokens_wait_until_the_first_chunk():
    admission = Admission(4, 4, max_queued_tokens=10)
    with admission.room(1) as first, admission.room(1) as second:
        first.read(8)
        with pytest.raises(ApiError) as told:
            second.read(3)
        assert (told.value.status, told.value.code) == (429, "queued_tokens")
        second.read(2)
        for _ in range(2):
            first.started()
            assert admission.tokens == 2
    with admission.room(1) as ticket:
        ticket.read(100)
        assert admission.tokens == 100, "one that is longer than all that may wait is taken alone"
    assert admission.tokens == 0


def test_retry_after_grows_with_what_requests_take():
    now = 0.0
    admission = Admission(1, 1, clock=lambda: now)
    assert admission.wait(1) == 1
    for _ in range(40):
        with admission.room(1) as ticket:
            now += 8
            ticket.started()
    for _ in range(40):
        with pytest.raises(ApiError), admission.room(1):
            raise ApiError(400, "refused before a token was decoded")
    with admission.room(2):
        assert (admission.wait(1), admission.wait(2)) == (8, 16)
