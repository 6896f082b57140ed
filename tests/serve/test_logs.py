"""Logs: one line of JSON each, whatever is in it and whoever reads it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from specbuild.serve.logs import MAX_TEXT, RequestLog, install


@pytest.fixture
def restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("specbuild", "uvicorn", "asyncio")]
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
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["message"], first["logger"]) == ("warning", "slow", "specbuild.runtime")
    assert (second["level"], second["error"]) == ("error", "KeyError: 'k'")
