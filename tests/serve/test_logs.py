"""Logs: one line of JSON each, whatever is in it and whoever reads it."""

import io
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pytest

from specbuild.serve.telemetry.logs import DEBUG, LOGGERS, Records, RequestLog, error_of, install


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    """Tracebacks are off, and loggers are as they were."""
    monkeypatch.delenv(DEBUG, raising=False)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(each.handlers, each.propagate) for each in loggers]
    yield
    for each, (handlers, propagate) in zip(loggers, before, strict=True):
        each.handlers, each.propagate = handlers, propagate


@pytest.fixture
def stream():
    return io.StringIO()


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_request_is_a_line(stream):
    log, texts = RequestLog(stream), {"prompt": "secret", "text": "secret"}
    log.ended(request_id="a\nb\ud800", status=200, user=None, seconds=0.12345678, **texts)
    log.ended(request_id="c", status=503, path="x" * 10_000)
    RequestLog(stream, log_requests=True).ended(status=200, **texts)
    first, second, third = lines(stream)
    assert (first["request_id"], first["level"], first["seconds"]) == ("a\nb\ud800", "info", 0.123457)
    assert not {"user", *texts} & first.keys()
    assert datetime.fromisoformat(first["time"]).utcoffset() == timedelta(0)
    assert (second["level"], len(second["path"])) == ("error", 2000), "docs/reference/security.md"
    assert texts.items() <= third.items(), "where that is asked for"


def test_nobody_who_reads_is_no_error(stream):
    stream.close()
    RequestLog(stream).event("info", "x")
    reader, writer = os.pipe()
    os.close(reader)
    pipe = io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)
    RequestLog(pipe).event("info", "x")
    with pytest.raises(BrokenPipeError):
        pipe.write("so it is")
    pipe.detach().close()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((each, each) for each in ("\ud800", "a\x00\x1b[31m\x7f\x85\u2028\r\nb", "é" * 9, {"a": [1]})),
        *((b"\xff", "b'\\xff'"), (float("nan"), "nan"), (float("inf"), "inf")),
    ],
)
def test_whatever_is_in_a_field_is_one_line_of_ascii(value, shown):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii", newline="\n")
    RequestLog(stream).event("info", "x", value=value)
    text = raw.getvalue().decode("ascii")
    assert (text[-1], text[:-1].isprintable()) == ("\n", True)
    assert json.loads(text)["value"] == shown


def test_a_finalizer_that_logs_amid_a_line_does_not_hang():
    """As asyncio's do for exceptions that nobody has fetched."""

    class Stream(io.StringIO):
        def write(self, text):
            if "outer" in text:
                log.event("error", "inner")
            return super().write(text)

    log = RequestLog(stream := Stream())
    with ThreadPoolExecutor(1) as pool:
        pool.submit(log.event, "info", "outer").result(30)
    assert [line["message"] for line in lines(stream)] == ["inner", "outer"]


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        *((("",), ""), (("\n  \nlate",), "late"), (("%d of %d", "x"), "%d of %d"), (("100%",), "100%")),
        ((UnreadableError(),), "UnreadableError"),
    ],
)
def test_a_record_that_cannot_be_shown_raises_nothing(stream, record, said):
    logger = logging.Logger("some.library")
    logger.addHandler(Records(RequestLog(stream)))
    logger.warning(*record)
    assert lines(stream)[0]["message"] == said


def test_tracebacks_where_they_are_asked_for(stream, monkeypatch):
    with pytest.raises(KeyError) as raised:
        {}["k\nl"]
    assert error_of(raised.value) == {"error": "KeyError: 'k\\nl'"}
    assert error_of(UnreadableError()) == {"error": "UnreadableError: "}
    monkeypatch.setenv(DEBUG, "1")
    RequestLog(stream).event("error", "x", **error_of(raised.value))
    assert "in test_tracebacks" in lines(stream)[0]["traceback"]


def test_libraries_warnings_are_lines(stream):
    install(RequestLog(stream))
    logging.getLogger("specbuild.runtime").warning("slow\nvery")
    try:
        raise KeyError("k")
    except KeyError:
        logging.getLogger("uvicorn.error").exception("failed")
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("opentelemetry.exporter").warning("not sent")
    first, second, third = lines(stream)
    assert (first["level"], first["message"], first["logger"]) == ("warning", "slow", "specbuild.runtime")
    assert (second["level"], second["error"]) == ("error", "KeyError: 'k'")
    assert (third["message"], third["logger"]) == ("not sent", "opentelemetry.exporter")
