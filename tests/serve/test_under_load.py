"""A server that many use at once: every text is a quiet engine's, no slot is lost, and it ends cleanly."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from crowd import Case, Crowd, Outcome, Quiet, cases
from serving import Server, until

from specbuild.runtime import Engine

FLAGS = ("--port", "0", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def quiet(bundle: Path) -> Iterator[Quiet]:
    with Engine.load(bundle, batch_size=4) as engine:
        yield Quiet(engine)


def load(server: Server) -> tuple[int, int, int]:
    """Requests, and samples that run and that wait."""
    with server.client() as client:
        told = client.get("/load").json()
    (model,) = told["models"].values()
    return told["server_load"], model["running"], model["waiting"]


def check(outcomes: Sequence[Outcome], quiet: Quiet, allowed: tuple[int, ...] = ()) -> int:
    """Hold outcomes against what may happen, and the texts against the engine's; how many were whole."""
    for outcome in outcomes:
        assert outcome.broken is None, outcome
        if outcome.status == 408 or outcome.code == "deadline":
            assert "deadline" in outcome.case.body, outcome
        else:
            assert (outcome.status, outcome.code) == (200, None) or outcome.status in allowed, outcome
        if not outcome.case.leaves:
            assert outcome.ended, outcome
            ends = [part["index"] for part in outcome.parts if part["finish_reason"]]
            assert outcome.code or sorted(ends) == list(range(outcome.case.body["n"])), outcome
    return sum(map(quiet.check, outcomes))


def asked(seed: int, count: int, prompts: Sequence[str]) -> list[Case]:
    """Cases over the prompts that leave room for long texts."""
    return cases(seed, count, [prompt for prompt in prompts if 0 < len(prompt) < 400])


@pytest.mark.soak
def test_two_thousand_requests_of_64_connections(bundle: Path, quiet: Quiet, prompts: list[str]) -> None:
    """The queue is so short that some are refused; the second half takes no more memory than the first."""
    pool = asked(2, 200, prompts)
    with Server(str(bundle), *FLAGS, "--max-waiting", "64") as server:
        crowd, sizes = Crowd(server.url, 64), list[int]()
        for _ in range(2):
            crowd.wave(pool * 5)
            until(lambda: load(server) == (0, 0, 0))
            sizes.append(resident(server.process.pid))
        assert len(crowd.outcomes) == 2000
        assert {each.code for each in crowd.refused} == {"queue_full"}
        assert check(crowd.outcomes, quiet) > 1000
        assert sizes[1] <= 1.02 * sizes[0], sizes
        assert not server.other
        assert not [line for line in server.lines if line["level"] == "error"]


def resident(pid: int) -> int:
    """KiB of memory that a process has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.nightly
def test_sigterm_under_load_leaves_nobody_without_an_answer(bundle: Path, quiet: Quiet, prompts: list[str]) -> None:
    """What was accepted is finished; what came later is told so, or finds nobody listening."""
    twenty = threading.Event()
    with Server(str(bundle), *FLAGS) as server:
        crowd = Crowd(server.url, 12)
        working = threading.Thread(
            target=crowd.wave, args=(asked(3, 2000, prompts), lambda done: twenty.set() if done >= 20 else None)
        )
        working.start()
        assert twenty.wait(60)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        working.join()
        assert not server.other
    begun = {line.get("request_id") for line in server.lines}
    lost = [each for each in crowd.outcomes if each.broken]
    assert not [each for each in lost if each.status or each.request_id in begun]
    told = [each for each in crowd.outcomes if not each.broken]
    draining = [each for each in told if each.status == 503]
    assert {each.code for each in draining} <= {"draining"}
    assert 20 <= len(told) < 2000
    assert len(lost) + len(draining) == 12, "everyone was sent away once"
    check(told, quiet, allowed=(503,))
