"""A server that many use at once: every text is a quiet engine's, no slot is lost, and it ends cleanly."""

import json
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest
from route_client import COMPLETIONS, joined
from serving import Server, until

from specbuild.runtime import SamplingParams

SERVERS = {"prompt", "max_tokens", "stream", "return_token_ids", "deadline", "priority", "speculation"}
EXTRAS = [
    *({"frequency_penalty": 0.5, "presence_penalty": 0.2}, {"repetition_penalty": 1.2}, {"top_p": 0.9, "top_k": 40}),
    *({"stop": ["\n\n", "self"]}, {"deadline": 0.001}, {"deadline": 0.05}, {"min_tokens": 1}, {}),
]


def body(rng, prompts):
    """A request; one that ignores the model's own end is left after its first event."""
    leaves = rng.random() < 0.2
    return {
        "prompt": rng.choice([prompt for prompt in prompts if 0 < len(prompt) < 400]),
        "max_tokens": 200 if leaves else rng.randint(1, 40),
        "temperature": rng.choice([0, 0.8, 1.0]),
        "seed": rng.randrange(2**32),
        "n": rng.choice([1, 1, 2]),
        "stream": leaves or rng.random() < 0.5,
        "speculation": rng.choice(["auto", "off", "chain:4", "best:8"]),
        "priority": rng.choice([-1, 0, 0, 3]),
        "ignore_eos": leaves,
        "return_token_ids": True,
    } | rng.choice(EXTRAS)


def ask(client, asked, number):
    """The status, and the events, or all of a reply as the only one; status 0: the connection was refused."""
    with (
        suppress(httpx.TransportError),
        client.stream("POST", COMPLETIONS, json=asked, headers={"X-Request-Id": f"load-{number}"}) as reply,
    ):
        if not reply.headers["content-type"].startswith("text/event-stream"):
            return reply.status_code, [json.loads(reply.read())]
        events = list[Any]()
        for line in (line.removeprefix("data: ") for line in reply.iter_lines() if line[:1] not in ("", ":")):
            assert "[DONE]" not in events, "nothing comes after the end"
            events.append(line if line == "[DONE]" else json.loads(line))
            if asked["ignore_eos"]:
                return 200, events
        assert events.pop() == "[DONE]"
        return 200, events
    return 0, []


def check(quiet, asked, status, events):
    """Hold what was told against the engine's texts; whether it is whole."""
    errors = [event["error"]["code"] for event in events if "error" in event]
    if status not in (0, 200) or errors:
        assert status in (200, 429, 503) or "deadline" in asked, (status, errors)
        return False
    own = {name: value for name, value in asked.items() if name not in SERVERS}
    parts = [choice for event in events for choice in event["choices"]]
    params = SamplingParams(asked["max_tokens"], **own, speculation="off")
    for index, expected in enumerate(quiet.generate(asked["prompt"], params)):
        mine = [part for part in parts if part["index"] == index]
        found = joined(mine)
        count, reason = len(found["token_ids"]), found.get("finish_reason")
        assert found["token_ids"] == expected.token_ids[:count], (asked, expected)
        assert expected.text.startswith(found["text"]), (asked, expected)
        if reason and mine[-1].get("stop_reason") != "deadline":
            assert (found["text"], count, reason) == (expected.text, len(expected.token_ids), expected.finish_reason)
        assert reason or asked["ignore_eos"] or not status
    return bool(status)


@pytest.mark.nightly
@pytest.mark.soak(only=("2000",))
@pytest.mark.parametrize("count", [100, 2000])
def test_every_text_is_a_quiet_engines(bundle, four, prompts, count):
    """The second half takes no more memory than the first; then SIGTERM: what was accepted is finished."""
    rng, sizes, ended = random.Random(2), list[int](), threading.Event()
    bodies = [body(rng, prompts) for _ in range(2 * count)]
    flags = ("--port", "0", "--max-num-seqs", "4", "--max-waiting", "64")
    with Server(str(bundle), *flags) as server, ThreadPoolExecutor(16) as pool, server.client() as client:

        def use(number):
            return (0, []) if ended.is_set() else ask(client, bodies[number], number)

        outcomes = list[Any]()
        for half in range(2):
            outcomes += pool.map(use, range(half * count // 2, (half + 1) * count // 2))
            until(lambda: client.get("/load").json()["server_load"] == 0)
            sizes.append(psutil.Process(server.process.pid).memory_info().rss)
        late = [pool.submit(use, number) for number in range(count, 2 * count)]
        until(lambda: sum(each.done() for each in late) > 20)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        ended.set()
        told = [each.result() for each in late]
        begun = {line.get("request_id") for line in server.lines}
        assert server.other == []
    assert not [n for n, (status, _) in enumerate(told, count) if not status and f"load-{n}" in begun]
    assert [status for status, _ in outcomes].count(0) == 0
    assert sum(check(four, asked, *got) for asked, got in zip(bodies, outcomes + told, strict=True)) > count / 2
    assert count < 1000 or sizes[1] <= 1.02 * sizes[0], sizes
    assert {line.get("status") for line in server.lines if line["level"] == "error"} <= {503}
