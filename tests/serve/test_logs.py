"""Logs: one line of JSON each, whatever is in it and whoever reads it."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from specbuild.serve.logs import DEBUG, LOGGERS, MAX_TEXT, Records, RequestLog, error_of, install


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEBUG, raising=False)


@pytest.fixture
def restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(each.handlers, each.propagate) for each in loggers]
    yield
    for each, (handlers, propagate) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagate


def test_a_request_is_a_line() -> None:
    stream = io.StringIO()
    log = RequestLog(stream)
    log.ended(request_id="a\nb\ud800", status=200, user=None, seconds=0.12345678, prompt="secret", text="secret")
    log.ended(request_id="c", status=503, path="x" * 10_000)
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["request_id"], first["level"], first["seconds"]) == ("a\nb\ud800", "info", 0.123457)
    assert "secret" not in stream.getvalue()
    assert "user" not in first
    assert (second["level"], len(second["path"])) == ("error", MAX_TEXT)


def test_texts_are_logged_where_that_is_asked_for() -> None:
    stream = io.StringIO()
    RequestLog(stream, log_requests=True).ended(status=200, prompt="p", text="t")
    assert (json.loads(stream.getvalue())["prompt"], json.loads(stream.getvalue())["text"]) == ("p", "t")


def test_nobody_who_reads_is_no_error() -> None:
    stream = io.StringIO()
    stream.close()
    RequestLog(stream).event("info", "x")
    reader, writer = os.pipe()
    os.close(reader)
    pipe = io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)
    RequestLog(pipe).event("info", "x")
    with pytest.raises(BrokenPipeError):
        pipe.write("so it is")
    pipe.detach().close()


class Unsayable:
    def __str__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize("value", ["\ud800", "a\x00\x1b[31m\x7f\x85\u2028\r\nb", "é" * 9, {"a": [1]}, b"\xff"])
def test_whatever_is_in_a_field_is_one_line_of_ascii(value: Any) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii", newline="\n")
    RequestLog(stream).event("info", "x", value=value)
    text = raw.getvalue().decode("ascii")
    assert text.endswith("\n")
    assert text[:-1].isprintable()
    shown = json.loads(text)["value"]
    assert shown == (value if isinstance(value, str | dict) else str(value))


def test_times_are_utc_and_no_number_breaks_json() -> None:
    stream = io.StringIO()
    RequestLog(stream).event("info", "x", rate=float("nan"), most=float("inf"))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    told = json.loads(stream.getvalue(), parse_constant=refuse)
    assert (told["rate"], told["most"]) == ("nan", "inf")
    assert datetime.fromisoformat(told["time"]).utcoffset() == timedelta(0)


def test_a_finalizer_that_logs_amid_a_line_does_not_hang() -> None:
    """As asyncio's do for exceptions that nobody has fetched."""

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            if "outer" in text:
                log.event("error", "inner")
            return super().write(text)

    stream = Stream()
    log = RequestLog(stream)
    thread = threading.Thread(target=log.event, args=("info", "outer"), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["inner", "outer"]


def test_threads_do_not_mix_their_lines() -> None:
    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            for part in text:
                super().write(part)
            return len(text)

    stream, together = Stream(), threading.Barrier(4)
    log = RequestLog(stream)

    def work(name: int) -> None:
        together.wait()
        for number in range(50):
            log.ended(request_id=f"{name}-{number}", status=200)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    ids = {json.loads(line)["request_id"] for line in stream.getvalue().splitlines()}
    assert len(ids) == 200


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (("",), ""),
        (("\n  \nlate",), "late"),
        (("%d of %d", "x"), "%d of %d"),
        ((Unsayable(),), "Unsayable"),
        (("100%",), "100%"),
    ],
)
def test_a_record_that_cannot_be_shown_raises_nothing(record: tuple[Any, ...], said: str) -> None:
    stream, logger = io.StringIO(), logging.Logger("some.library")
    logger.addHandler(Records(RequestLog(stream)))
    logger.warning(*record)
    assert json.loads(stream.getvalue())["message"] == said


def test_tracebacks_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("k\nl")

    with pytest.raises(KeyError) as raised:
        fail()
    assert error_of(raised.value) == {"error": "KeyError: 'k\\nl'"}
    assert error_of(UnreadableError()) == {"error": "UnreadableError: "}
    monkeypatch.setenv(DEBUG, "1")
    stream = io.StringIO()
    RequestLog(stream).event("error", "x", **error_of(raised.value))
    (line,) = stream.getvalue().splitlines()
    assert "in fail" in json.loads(line)["traceback"]


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


@pytest.mark.usefixtures("restored")
def test_libraries_warnings_are_lines() -> None:
    stream = io.StringIO()
    install(RequestLog(stream))
    logging.getLogger("specbuild.runtime").warning("slow\nvery")
    try:
        raise KeyError("k")
    except KeyError:
        logging.getLogger("uvicorn.error").exception("failed")
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("opentelemetry.exporter").warning("not sent")
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    assert (third["message"], third["logger"]) == ("not sent", "opentelemetry.exporter")
    assert (first["level"], first["message"], first["logger"]) == ("warning", "slow", "specbuild.runtime")
    assert (second["level"], second["error"]) == ("error", "KeyError: 'k'")
