"""The ledger: every request that ended has its row, whatever ends the server, and machine and requests add up."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from datetime import date, datetime, timedelta, timezone
from types import SimpleNamespace

import httpx
import pytest
from route_client import COMPLETIONS
from serving import Server, running

from specbuild.measure.cost.rows import read
from specbuild.runtime import RequestMetrics, Result
from specbuild.runtime.errors import OptionError
from specbuild.serve.cost.ledger import Ledger
from specbuild.serve.cost.options import CostOptions

GREEDY = {"prompt": "def main(", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def ended(model, number=0, samples=1, plain=4.0, **more):
    """A generation that has ended, of samples that were busy for two seconds each."""
    found, engine = {}, model.engine.engine
    for choice in range(samples):
        own = RequestMetrics(7, 0, "auto", num_output_tokens=5, num_cached_tokens=3, busy_time=2.0, plain_time=plain)
        own.speculative_decoding.record(4, 3)
        found[choice] = Result("", [1] * 5, "length", own)
        engine.stats.total += 2.0
    fields = {"served": model, "engine": engine, "request_id": f"r{number}", "tenant": "t", "arm": None}
    return SimpleNamespace(**fields | {"body": SimpleNamespace(user="ann"), "results": found} | more)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "l.jsonl"


@pytest.fixture
def make(file, log):
    """`make(**fields of CostOptions or Ledger)`: a ledger in the file, and what it needs of a served model."""

    def found(**given):
        times = {name: given.pop(name) for name in ("machine_seconds", "today") if name in given}
        options = CostOptions(ledger=file, price_per_hour=3.6, owner=("team=search",), **given)
        ledger = Ledger(options, log, sync_seconds=0.01, **times)
        engine = SimpleNamespace(stats=SimpleNamespace(total=0.0), correction=1.5)
        model = SimpleNamespace(name="m", engine=SimpleNamespace(engine=engine))
        ledger.begin([model])
        return ledger, model

    return found


def names(*files):
    return [row.request_id for row in read([*files]).requests]


def busy(*files):
    return sum(row.busy_seconds["m"] for row in read([*files]).machines)


def test_a_request_has_a_row_of_all_its_samples(make, file):
    ledger, model = make(currency="EUR")
    ledger.ended(ended(model, 1, samples=2))
    ledger.ended(ended(model, 2, plain=float("nan"), arm="baseline"))
    ledger.ended(ended(model, 3, results={}))  # its client left
    one, two = read([file]).requests
    told = {"request_id": "r1", "model": "m", "user": "ann", "tenant": "t", "speculation": "auto", "arm": None}
    told |= {"prompt_tokens": 14, "cached_tokens": 6, "output_tokens": 10, "draft_tokens": 8, "accepted_tokens": 6}
    told |= {"busy_seconds": 4.0, "plain_seconds": 8.0, "correction": 1.5, "finish_reasons": {"length": 2}}
    assert told.items() <= asdict(one).items()
    assert (two.plain_seconds, two.arm) == (None, "baseline")
    ledger.close()
    ledger.close()
    first, last = read([file]).machines
    assert (first.busy_seconds, last.busy_seconds) == ({"m": 0.0}, {"m": 8.0})
    assert (last.price_per_hour, last.currency, last.labels) == (3.6, "EUR", {"team": "search"})
    ledger.ended(ended(model, 4))
    assert names(file) == ["r1", "r2"], "it is closed"


def test_a_ledger_goes_on_behind_a_line_that_was_cut_off(make, file):
    for number in (1, 2):
        ledger, model = make()
        ledger.ended(ended(model, number))
        ledger.close()
        if number == 1:
            with file.open("ab") as torn:
                torn.write(b'{"time":"2026-')
    assert (names(file), read([file]).torn) == (["r1", "r2"], 1)
    assert len({row.server for row in read([file]).machines}) == 2


def test_one_server_alone_writes_a_file(make, log, tmp_path):
    ledger, _ = make()
    with pytest.raises(OptionError, match="another server"):
        make()
    ledger.close()
    make()[0].close()
    for path in (tmp_path, tmp_path / "none" / "l.jsonl", None):
        with pytest.raises(OptionError, match="ledger"):
            Ledger(CostOptions(ledger=path), log)


def run(ledger, holds):
    """Let it run until something is so."""

    async def wait():
        async with running(ledger.run()):
            for _ in range(2000):
                if holds():
                    return
                await asyncio.sleep(0.005)

    asyncio.run(wait())
    assert holds()


def test_rows_are_synced_and_the_machine_is_told_of(make, file, monkeypatch):
    synced, sync = list[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), sync(file)))
    ledger, model = make(machine_seconds=0.0)
    ledger.ended(ended(model))
    run(ledger, lambda: bool(synced) and len(read([file]).machines) > 2)
    ledger.close()
    assert busy(file) == 2.0


@pytest.mark.parametrize("by", ["day", "1KB"])
def test_a_file_that_is_full_or_of_yesterday_is_put_aside(make, file, by):
    day = [date(2026, 12, 31)]
    ledger, model = make(ledger_rotate=by, today=lambda: day[0])
    for number in range(4):
        ledger.ended(ended(model, number))
    if by == "day":
        day[0] += timedelta(1)
    run(ledger, lambda: len([*file.parent.iterdir()]) == 2)
    ledger.ended(ended(model, 4))
    ledger.close()
    files = sorted(file.parent.glob("l*.jsonl"), key=lambda path: path == file)
    assert names(*files) == [f"r{n}" for n in range(5)]
    assert all(read([each]).machines for each in files), "each can be priced alone"
    assert busy(*files) == 10.0


def test_what_was_busy_before_midnight_is_of_the_day_before(make, file):
    days = [datetime.now(timezone.utc).date() - timedelta(1), datetime.now(timezone.utc).date()]
    ledger, model = make(today=lambda: days[0])
    ledger.ended(ended(model))
    run(ledger, lambda: len(read([file]).machines) == 1)
    del days[0]
    run(ledger, lambda: len(read([file]).machines) == 2)
    ledger.close()
    _, before, after = read([file]).machines
    assert (before.day, before.busy_seconds, after.busy_seconds) == (days[0] - timedelta(1), {"m": 2.0}, {"m": 0.0})


def test_what_cannot_be_written_is_in_the_log(make, log, monkeypatch):
    ledger, model = make()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: 3)
        ledger.ended(ended(model, 1))
    ledger.ended(ended(model, 2, request_id=None, served=None))
    ledger.close()
    assert [(line["level"], "r1" in str(line.get("row"))) for line in log.lines] == [("error", True), ("error", False)]


def serving(bundle, ledger, *flags):
    return Server(str(bundle), "--port", "0", "--ledger", str(ledger), "--price-per-hour", "3.6", *flags)


@pytest.mark.slow
def test_requests_add_up_to_the_machine(bundle, file):
    """Several at once, whole and streamed, with samples and without speculation; and metrics say the same."""
    ways = [{}, {"stream": True}, {"n": 2, "temperature": 1.0}, {"speculation": "off"}, {"speculation": "chain:2"}]
    bodies = [GREEDY | way | {"user": f"u{n}"} for n, way in enumerate(ways * 3)]
    flags = "--canary speculation=off --canary-weight 50".split()  # texts of this candidate are not decoded again
    with serving(bundle, file, *flags) as server, server.client() as client:
        with ThreadPoolExecutor(4) as pool:
            assert {*pool.map(lambda body: client.post(COMPLETIONS, json=body).status_code, bodies)} == {200}
        told = dict(line.rpartition(" ")[::2] for line in client.get("/metrics").text.splitlines() if line[0] != "#")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    found = read([file])
    arms = {row.user: row.arm for row in found.requests}
    assert {body["user"]: "speculation" in body for body in bodies} == {user: arms[user] is None for user in arms}
    assert {*arms.values()} <= {None, "baseline", "candidate"}
    spent = sum(row.busy_seconds for row in found.requests)
    machine = sum(row.busy_seconds["pycode"] for row in found.machines)
    assert spent == pytest.approx(machine, rel=0.01)
    assert machine <= sum(row.seconds for row in found.machines)
    series = 'busy_seconds_total{model_name="pycode"}', 'cost_total{currency="USD",model_name="pycode"}'
    assert [float(told[f"specbuild:{name}"]) for name in series] == pytest.approx([spent, spent / 1000], rel=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_is_killed_has_lost_no_answered_requests_row(bundle, file, stream):
    answered, enough = list[str](), threading.Event()
    with serving(bundle, file) as server, server.client() as client:

        def ask(number):
            with suppress(httpx.HTTPError):
                for turn in range(1000):
                    body = {"request_id": f"{number}-{turn}", "stream": stream, "max_tokens": 3 + turn % 5}
                    if client.post(COMPLETIONS, json=GREEDY | body).status_code == 200:  # read to its end
                        answered.append(f"{number}-{turn}")
                    if len(answered) > 40:
                        enough.set()

        with ThreadPoolExecutor(4) as pool:
            for number in range(4):
                pool.submit(ask, number)
            assert enough.wait(60)
            server.signal(signal.SIGKILL)
    assert not {*answered} - {*names(file)}
    with serving(bundle, file) as server:
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert len({row.server for row in read([file]).machines}) == 2
