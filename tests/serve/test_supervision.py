"""Supervision: what runs beside requests runs again after a bug, and health and metrics say what does not run."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from serving import running

from specbuild.serve.supervision import Supervisor, together


class Flaky:
    """A watcher that fails so many times."""

    def __init__(self, failures):
        self.failures, self.runs = failures, 0

    def ended(self, generation): ...

    async def run(self):
        self.runs += 1
        if self.runs <= self.failures:
            raise KeyError("planted")
        await asyncio.Event().wait()


def test_a_watcher_that_fails_is_told_of_and_started_again(log, make_client):
    events = log
    watcher, registry = Flaky(2), CollectorRegistry()
    supervisor = Supervisor([watcher], events, first=0.01)
    registry.register(supervisor)

    def value(name):
        return registry.get_sample_value(f"specbuild:watcher_{name}", {"watcher": "flaky"})

    async def run():
        async with running(supervisor.run()):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert (supervisor.states, value("up")) == ({"flaky": "failed"}, 0)
            while watcher.runs < 3:
                await asyncio.sleep(0.01)
            assert (supervisor.states, value("up"), value("failures_total")) == ({"flaky": "running"}, 1, 2)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert ["planted" in line["error"] for line in log.lines] == [True, True]
    client = make_client()
    object.__setattr__(client.service, "supervisor", supervisor)
    assert client.get("/health").json()["watchers"] == {"flaky": "running"}


def test_none_of_what_runs_together_outlives_the_others():
    ends = list[str]()

    async def waits():
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    async def fails():
        await asyncio.sleep(0)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        asyncio.run(together(waits(), fails()))
    assert ends == ["cancelled"]
