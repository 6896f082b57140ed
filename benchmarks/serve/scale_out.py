"""Test two replicas on this machine: long chats by prefix and random routing, a death, scaling to zero, Ray's overhead.

python -m benchmarks.serve.scale_out BUNDLE [--wide WIDE] [--out FILE] [--only chats,death,zero,overhead]

Texts are compared with those of engines without a server. Each replica has one thread. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common import OUT, Server, in_turns, machine, parser, prompts, quantile, save, serving
from benchmarks.serve.http_overhead import compared, crowd, served
from specbuild.runtime import Chat, Engine, SamplingParams

TEMPLATE = (  # a question with its answer begins as the question did, as in real chat templates
    "{% for message in messages %}# {{ message['role'] }}:\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)
USERS, TURNS, AT_ONCE, TOKENS = 50, 10, 6, 24
FEW, KILLED_AFTER = 12, 40  # users of the run with a death, and answers before it
STARTS = 4  # starts of both servers in which Ray's overhead is measured
AT_ZERO = 120  # seconds in which replicas without requests must be gone
SYSTEM = "You write Python. Answer with one function and nothing else."
PARTS = ("chats", "death", "zero", "overhead")
Row = dict[str, Any]


def question(user: int, turn: int) -> str:
    """Return what a user says in a turn; it begins with the user's number, so that no two users share a prefix."""
    texts = prompts()
    return f"user {user}: {texts[(user * TURNS + turn) % len(texts)][:60]}"


def seed_of(user: int, turn: int) -> int:
    """Return a request's seed."""
    return 1000 * user + turn


@contextmanager
def replicas(bundle: Path, *flags: str) -> Iterator[Server]:
    """Yield a server with the chats' template once it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "chat.jinja"
        template.write_text(TEMPLATE)
        with serving(bundle, "--chat-template", str(template), "--ray", *flags) as server:
            while httpx.get(f"{server.url}/health/ready", timeout=60).status_code != 200:
                time.sleep(0.5)
            yield server


async def request(client: httpx.AsyncClient, messages: list[dict[str, str]], row: Row) -> None:
    """Ask for the next answer of a chat as a stream; fill in the request's row."""
    body: Row = {
        "messages": messages,
        "max_tokens": TOKENS,
        "seed": seed_of(row["user"], row["turn"]),
        "temperature": 0.8,
    }
    body |= {"seed": seed_of(row["user"], row["turn"]), "stream": True, "stream_options": {"include_usage": True}}
    began = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            row |= {"status": response.status_code, "replica": response.headers.get("x-replica")}
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    row["done"] = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    row |= {"error": event["error"]} if "error" in event else {}
                    for choice in event.get("choices", ()):
                        row.setdefault("ttft", time.perf_counter() - began)
                        row["text"] += choice["delta"].get("content") or ""
                    if usage := event.get("usage"):
                        row["prompt"] = usage["prompt_tokens"]
                        row["cached"] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    except (httpx.HTTPError, ValueError) as error:
        row["broken"] = repr(error)


async def chats(url: str, users: int, turns: int, rows: list[Row]) -> None:
    """Run every user's chat, AT_ONCE at a time; append a row for each request."""
    waiting = list(range(users))
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def chat(user: int) -> None:
            messages = [{"role": "system", "content": SYSTEM}]
            for turn in range(turns):
                messages.append({"role": "user", "content": question(user, turn)})
                rows.append(row := {"user": user, "turn": turn, "text": "", "done": False})
                await request(client, messages, row)
                messages.append({"role": "assistant", "content": row["text"]})

        async def one() -> None:
            while waiting:
                await chat(waiting.pop(0))

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))


def decoded(bundle: Path, users: list[int]) -> dict[tuple[int, int], str]:
    """Decode users' chats with one engine of one thread; return the texts by user and turn."""
    texts = dict[tuple[int, int], str]()
    with Engine.load(bundle, threads=1, chat_template=TEMPLATE) as engine:
        for user in users:
            messages = [{"role": "system", "content": SYSTEM}]
            for turn in range(TURNS):
                messages.append({"role": "user", "content": question(user, turn)})
                params = SamplingParams(TOKENS, temperature=0.8, seed=seed_of(user, turn))
                (result,) = engine.generate([Chat(list(messages))], params)
                texts[user, turn] = result.text
                messages.append({"role": "assistant", "content": result.text})
    return texts


def alone(bundle: Path, users: int) -> dict[tuple[int, int], str]:
    """Return the same chats' texts from two engines side by side, without a server."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        one, other = pool.starmap(decoded, [(bundle, list(range(users))[half::2]) for half in (0, 1)])
    return one | other


def answered(row: Row) -> bool:
    """Return whether a request has its whole answer."""
    return row["done"] and "error" not in row


def outcomes(rows: list[Row], texts: dict[tuple[int, int], str]) -> Row:
    """Count answered requests, texts equal to one engine's, clean errors and broken connections."""
    return {
        "requests": len(rows),
        "answered": sum(map(answered, rows)),
        "texts_equal": sum(answered(row) and texts[row["user"], row["turn"]] == row["text"] for row in rows),
        "clean_errors": sum("error" in row or row.get("status", 200) >= 400 for row in rows if "broken" not in row),
        "broken": sum("broken" in row for row in rows),
    }


def routings(bundle: Path, users: int) -> Row:
    """Run all chats with each routing; return outcomes, the hit rate of prompt tokens, and times to the first token."""
    texts, found = alone(bundle, users), Row()
    for routing in ("random", "prefix"):
        rows = list[Row]()
        with replicas(bundle, "--num-replicas", "2", "--routing", routing) as server:
            began = time.perf_counter()
            asyncio.run(chats(server.url, users, TURNS, rows))
            seconds = time.perf_counter() - began
        times, known = [row["ttft"] for row in rows if answered(row)], [row for row in rows if "prompt" in row]
        found[routing] = outcomes(rows, texts) | {
            "hit_rate": sum(row["cached"] for row in known) / sum(row["prompt"] for row in known),
            "ttft_median": statistics.median(times),
            "ttft_p99": quantile(times, 0.99),
            "seconds": seconds,
        }
    return found | {"prefix/random": found["prefix"]["hit_rate"] / found["random"]["hit_rate"]}


def processes_of_ray(server: psutil.Process) -> list[psutil.Process]:
    """Return Ray's processes: it detaches them, so all of this user's that began no earlier than the server's."""
    began, user = server.create_time(), os.getuid()
    return [p for p in psutil.process_iter() if p.create_time() >= began and p.uids().real == user and p.cmdline()]


def death(bundle: Path) -> Row:
    """Kill one of two replicas under load; return the outcomes of all requests, and of chats without a loss."""
    texts, rows = alone(bundle, FEW), list[Row]()
    with replicas(bundle, "--num-replicas", "2") as server:

        async def work() -> None:
            working = asyncio.ensure_future(chats(server.url, FEW, TURNS, rows))
            while sum(row["done"] for row in rows) < KILLED_AFTER:
                await asyncio.sleep(0.05)
            processes = processes_of_ray(psutil.Process(server.process.pid))
            victim = next(p for p in processes if "ServeReplica:specbuild:Replica" in " ".join(p.cmdline()))
            victim.send_signal(signal.SIGKILL)
            await working

        asyncio.run(work())
    # Without users who lost an answer, since their later prompts differ.
    lost = {row["user"] for row in rows if not answered(row)}
    return {
        "all": outcomes(rows, texts),
        "chats_without_a_loss": outcomes([r for r in rows if r["user"] not in lost], texts),
    }


def zero(bundle: Path) -> Row:
    """Let replicas scale to zero without requests and back with one; return the times."""
    found, scaling = Row(), ("--autoscale", "0,2", "--downscale-delay-s", "2", "--upscale-delay-s", "0")
    with replicas(bundle, *scaling) as server:
        for attempt in ("first", "again"):
            rows, began = list[Row](), time.perf_counter()
            asyncio.run(chats(server.url, 1, 1, rows))
            answered_at = time.perf_counter()
            while httpx.get(f"{server.url}/load", timeout=60).json()["replicas"]:
                time.sleep(0.5)
                if time.perf_counter() - answered_at > AT_ZERO:
                    return found | {"at_zero": False}
            found[attempt] = {
                "request_seconds": answered_at - began,
                "answered": rows[0]["done"],
                "seconds_until_zero": time.perf_counter() - answered_at,
            }
    return found | {"at_zero": True}


def overhead(bundle: Path, turns: int) -> Row:
    """Compare one replica with the plain server in turns: four requests at once, one thread each.

    Both are started STARTS times, since one start's engine may be a tenth faster than the next one's.
    """
    texts, flags = (prompts() * 16)[:16], ("--threads", "1", "--max-num-seqs", "4")
    rows: dict[str, list[dict[str, float]]] = {"plain": [], "ray": []}
    for _ in range(STARTS):
        with serving(bundle, *flags) as plain, serving(bundle, "--ray", *flags) as ray:
            ways = {
                name: lambda url=server.url: asyncio.run(crowd(served(url), texts, 4))
                for name, server in (("plain", plain), ("ray", ray))
            }
            for name, found in in_turns(ways, turns).items():
                rows[name] += found
    return compared(rows, "ray", "plain")


def measure(part: str, given: argparse.Namespace) -> Row:
    """Run one part of the benchmark."""
    if part == "overhead":
        return {each.name: overhead(each, given.turns) for each in (given.bundle, given.wide) if each}
    if part == "chats":
        return routings(given.bundle, given.users)
    return {"death": death, "zero": zero}[part](given.bundle)


def main() -> None:
    """Run the chosen parts, and print and write their rows; other parts stay as they were measured."""
    options = parser(__doc__, OUT / "scale-out.json")
    options.add_argument("bundle", type=Path)
    options.add_argument("--wide", type=Path, help="for the overhead: a bundle whose steps take a real model's time")
    options.add_argument("--users", type=int, default=USERS)
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--only", default=",".join(PARTS))
    given = options.parse_args()
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    for part in given.only.split(","):
        found[part] = measure(part, given) | {"machine": machine()}
        print(save(given.out, found), flush=True)


if __name__ == "__main__":
    main()
