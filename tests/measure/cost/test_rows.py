"""Rows are read as they were written; what a crash cut off is counted, and what is no ledger is refused."""

from datetime import date

import pytest
from ledgers import machine, request, written

from specbuild.measure.cost.rows import MAX_LINE, line_of, now, read
from specbuild.runtime.errors import OptionError


def test_rows_come_back_in_the_order_of_their_files(tmp_path):
    first = written(tmp_path / "a", [machine(), request(1, user=None, plain_seconds=None)])
    second = written(tmp_path / "b", [request(2, user='ä\n"', arm="baseline"), machine(seconds=7.0)])
    found = read([first, second])
    assert found.requests == [request(1, user=None, plain_seconds=None), request(2, user='ä\n"', arm="baseline")]
    assert found.machines == [machine(), machine(seconds=7.0)]
    assert (found.torn, found.requests[0].day) == (0, date(2026, 3, 2))


def test_a_day_is_utcs():
    assert request(time="2026-03-02T23:30:00.000-02:00").day == date(2026, 3, 3)
    assert now().endswith("+00:00")


@pytest.mark.parametrize("cut", [1, 20, -2])
def test_lines_that_a_crash_cut_off_are_counted_and_the_others_read(tmp_path, cut):
    """A whole last line counts without its end."""
    torn = line_of(request(7))[:cut] + b"\n"
    path = written(
        tmp_path / "a", [machine(), request(1)], torn + line_of(request(2)) + torn + line_of(request(3))[:-1]
    )
    found = read([path])
    assert [row.request_id for row in found.requests] == ["r1", "r2", "r3"]
    assert found.torn == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"hello\n", "no row of a ledger"),
        (b"[1]\n", "line 1"),
        (line_of(request()).replace(b'"schema":1', b'"schema":2'), "schema"),
        (line_of(request()).replace(b'"model"', b'"modell"'), "model"),
        (line_of(request()).replace(b'"busy_seconds":10.0', b'"busy_seconds":-1.0'), "busy_seconds"),
        (line_of(machine()).replace(b"EUR", b"euro"), "currency"),
        (line_of(machine()).replace(b"2026-03", b"2026-99"), "line 1"),
        (b'"' + b"a" * MAX_LINE + b'"\n', "too long"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_ledger_is_refused(tmp_path, content, words):
    path = tmp_path / "a"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=words) as raised:
        read([path])
    assert str(path) in str(raised.value)
