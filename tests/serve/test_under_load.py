"""A crowd of clients, many of them bad ones: every text is the quiet engine's, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Server

from specbuild.runtime import Engine, SamplingParams

TREES = ("auto", "auto", "off", "chain:4", "topk:2,3", "best:8")
MALFORMED = ({"prompt": 5}, {"prompt": "x", "n": 0}, {"colour": 1}, {"prompt": "x" * 20_000}, {"prompt": ""})


@dataclass
class Crowd:
    """What became of many requests. `texts`: by request, each sample's text, and whether it was cut by a deadline."""

    texts: dict[int, list[tuple[str, bool]]] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    left: int = 0  # clients that left in the middle
    memory: list[int] = field(default_factory=list)  # of the server, in kB, as requests ended


def request(index: int, prompts: list[str]) -> dict[str, Any]:
    """A request by its number, with a seed."""
    rng = random.Random(index)
    body: dict[str, Any] = {"prompt": rng.choice(prompts), "seed": index, "max_tokens": rng.choice([4, 12, 24])}
    body["temperature"] = rng.choice([0, 0.8, 1])
    body |= rng.choice([{}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}, {"top_p": 0.9, "top_k": 40}])
    body |= rng.choice([{}, {}, {"n": 2}, {"priority": rng.randrange(-2, 3)}, {"stop": ["\n"]}, {"min_tokens": 3}])
    return body


def asked(index: int, body: dict[str, Any]) -> dict[str, Any]:
    """A request as a client of the crowd sends it: what speculates, and how it is read."""
    rng = random.Random(-index - 1)
    sent = body | {"speculation": rng.choice(TREES), "stream": rng.random() < 0.5}
    return sent | ({"deadline": rng.choice([0.02, 0.2])} if rng.random() < 0.05 else {})


async def one(client: httpx.AsyncClient, index: int, prompts: list[str], crowd: Crowd) -> None:
    kind = random.Random(index * 31).random()
    if kind < 0.05:
        reply = await client.post("/v1/completions", json=random.Random(index).choice(MALFORMED))
        crowd.statuses[reply.status_code] += 1
        return
    body = asked(index, request(index, prompts))
    texts, cuts = [""] * body.get("n", 1), [False] * body.get("n", 1)
    events = 0
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        crowd.statuses[reply.status_code] += 1
        if reply.status_code != 200:
            await reply.aread()
            assert reply.json()["error"]["code"] in ("deadline", "draining")
            return
        if kind < 0.25:  # leaves: a stream after some events, another before its answer
            async for _ in reply.aiter_lines():
                events += 1
                if events > 3:
                    break
            crowd.left += 1
            return
        if body["stream"]:
            ended = False
            async for line in reply.aiter_lines():
                ended |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    told = json.loads(line[6:])
                    if "error" in told:
                        assert told["error"]["code"] in ("deadline", "draining")
                        return
                    _take(told, texts, cuts)
            assert ended
        else:
            await reply.aread()
            _take(reply.json(), texts, cuts)
    crowd.texts[index] = list(zip(texts, cuts, strict=True))


def _take(told: dict[str, Any], texts: list[str], cuts: list[bool]) -> None:
    for choice in told["choices"]:
        texts[choice["index"]] += choice["text"]
        cuts[choice["index"]] |= choice.get("stop_reason") == "deadline"


def memory_of(pid: int) -> int:
    """Resident kB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


async def run(server: Server, prompts: list[str], count: int, connections: int) -> Crowd:
    crowd, left = Crowd(), list(range(count))[::-1]
    limits = httpx.Limits(max_connections=connections)

    async def client_of() -> None:
        while left:
            index = left.pop()
            await one(client, index, prompts, crowd)
            if index % 100 == 0:
                crowd.memory.append(memory_of(server.process.pid))

    async with httpx.AsyncClient(base_url=server.url, timeout=900, limits=limits) as client:
        await asyncio.gather(*(client_of() for _ in range(connections)))
    return crowd


def check_texts(crowd: Crowd, bundle: Path, prompts: list[str]) -> None:
    """Every completed text is plain decoding's of one sequence at a time; what was cut is its beginning."""
    numbers = sorted(crowd.texts)
    bodies = [request(index, prompts) for index in numbers]
    params = [SamplingParams(**{k: v for k, v in body.items() if k != "prompt"}, speculation="off") for body in bodies]
    with Engine.load(bundle, prefix_caching=False) as engine:
        results = iter(engine.generate([body["prompt"] for body in bodies], params))
        for index, body in zip(numbers, bodies, strict=True):
            for text, cut in crowd.texts[index]:
                want = next(results).text
                assert want.startswith(text) if cut else want == text, (index, body)


def check_at_rest(server: Server) -> None:
    with server.client() as client:
        told = client.get("/load").json()
        assert told["server_load"] == 0
        (usage,) = told["models"].values()
        assert (usage["running"], usage["waiting"]) == (0, 0)


@pytest.fixture
def server(bundle: Path) -> Iterator[Server]:
    with Server(str(bundle), "--port", "0", "--max-num-seqs", "4") as server:
        yield server


@pytest.mark.parametrize(
    ("count", "connections"), [(60, 8), pytest.param(2000, 64, marks=pytest.mark.soak)], ids=["small", "crowd"]
)
def test_a_crowd(server: Server, bundle: Path, prompts: list[str], count: int, connections: int) -> None:
    crowd = asyncio.run(run(server, prompts, count, connections))
    assert set(crowd.statuses) <= {200, 400, 408}
    assert len(crowd.texts) > count / 2
    assert crowd.left > count / 20
    check_at_rest(server)
    check_texts(crowd, bundle, prompts)
    assert not server.other
    assert all(line["status"] < 500 for line in server.lines if line["message"] == "request")
    print(f"{count} requests, {dict(crowd.statuses)}, {crowd.left} left, memory in kB: {crowd.memory}")
    if count >= 2000:
        half = crowd.memory[len(crowd.memory) // 2 :]
        assert half[-1] <= 1.02 * half[0], crowd.memory


CLIENT = """
import json, sys, urllib.request
body = json.dumps({"prompt": "def main(", "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
asked = urllib.request.Request(sys.argv[1] + "/v1/completions", body, {"Content-Type": "application/json"})
with urllib.request.urlopen(asked) as reply:
    reply.readline()
    print("begun", flush=True)
    reply.read()
"""


def test_clients_that_are_killed_free_their_slots(server: Server) -> None:
    command = [sys.executable, "-c", CLIENT, server.url]
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for each in clients:
        assert each.stdout
        assert each.stdout.readline() == "begun\n"
    for each in clients:
        each.kill()
        each.wait()
        assert each.stdout
        each.stdout.close()
    with server.client() as client:
        while client.get("/load").json()["server_load"]:
            pass
    check_at_rest(server)


def test_sigterm_under_load_answers_everybody(bundle: Path, prompts: list[str]) -> None:
    """What was accepted is a whole text, or an error that says what to do; what comes later finds no server."""
    with Server(str(bundle), "--port", "0", "--max-num-seqs", "4", "--shutdown-timeout", "20") as server:
        crowd, refused = Crowd(), []

        async def client_of(number: int) -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                for index in range(number, 400, 8):
                    try:
                        await one(client, index, prompts, crowd)
                    except httpx.ConnectError:
                        refused.append(index)
                        return
                    except httpx.RemoteProtocolError as error:
                        if "without sending a response" not in str(error):  # an idle connection is closed so
                            raise
                        return

        async def main() -> None:
            await asyncio.gather(*(client_of(number) for number in range(8)))

        threading.Timer(1.0, lambda: server.signal(signal.SIGTERM)).start()
        asyncio.run(main())
        assert server.wait() == 0
        assert set(crowd.statuses) <= {200, 400, 408, 503}
        check_texts(crowd, bundle, prompts)
