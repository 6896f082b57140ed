"""Test two replicas on this machine: long chats by prefix and random routing, a death, scaling to zero, Ray's overhead.

python benchmarks/scale_out.py BUNDLE [--wide WIDE] --out FILE [--only chats,whole,death,zero,overhead]

Texts are compared with those of engines without a server. Each replica has one thread. `whole` is `chats` with whole
answers instead of streams, and with an engine's times, for `fleet.py check`. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import httpx
import psutil
from http_overhead import crowd, served

from specbuild.runtime import Chat, Engine, SamplingParams

TEMPLATE = (  # a question with its answer begins as the question did, as in real chat templates
    "{% for message in messages %}# {{ message['role'] }}:\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)
USERS, TURNS, AT_ONCE, TOKENS = 50, 10, 6, 24
CROWDS = (1, 2, 4)  # chats at once, by which an engine is timed
Took = tuple[int, int, float, float]  # chats at once, prompt tokens read, seconds until all had begun, and per token
ROW = ("user", "turn", "prompt", "cached", "ttft", "seconds", "replica")
STARTS = 4  # starts of both servers in which Ray's overhead is measured
SYSTEM = "You write Python. Answer with one function and nothing else."


def asked(user: int, turn: int) -> str:
    """Return what a user says in a turn; it begins with the user's number, so that no two users share a prefix."""
    texts = common.prompts()
    return f"user {user}: {texts[(user * TURNS + turn) % len(texts)][:60]}"


def seed_of(user: int, turn: int) -> int:
    """Return a request's seed."""
    return 1000 * user + turn


@contextmanager
def server(bundle: Path, template: Path | None, *flags: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run a server of a bundle; yield its URL and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = ["--chat-template", str(template)] if template else []
    command = [
        str(Path(sys.executable).parent / "specbuild"),
        "serve",
        str(bundle),
        "--port",
        str(port),
        *given,
        *flags,
    ]
    with (
        Path(os.environ.get("SCALE_OUT_LOG", os.devnull)).open("a") as log,
        subprocess.Popen(command, stderr=log, stdout=log) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            for _ in range(600):
                try:
                    if httpx.get(f"{url}/health/ready", timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                assert process.poll() is None, "the server ended"
                time.sleep(0.5)
            yield url, process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


async def chat(client: httpx.AsyncClient, user: int, turns: int, told: list[dict[str, Any]], stream: bool) -> None:
    """Run a user's chat, turn by turn; append a row for every request to `told`."""
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(turns):
        messages.append({"role": "user", "content": asked(user, turn)})
        body = {"messages": messages, "max_tokens": TOKENS, "seed": seed_of(user, turn), "temperature": 0.8}
        body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        row: dict[str, Any] = {"user": user, "turn": turn, "text": "", "done": False}
        told.append(row)
        began = time.perf_counter()
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                row |= {"status": response.status_code, "replica": response.headers.get("x-replica")}
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        row["done"] = True
                    elif line.startswith("data: ") or not stream:
                        event = json.loads(line.removeprefix("data: "))
                        row["done"] = not stream
                        if "error" in event:
                            row["error"] = event["error"]
                        for choice in event.get("choices", ()):
                            if stream:
                                row.setdefault("ttft", time.perf_counter() - began)
                            row["text"] += choice["delta" if stream else "message"].get("content") or ""
                        if usage := event.get("usage"):
                            row["prompt"] = usage["prompt_tokens"]
                            row["cached"] = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        except (httpx.HTTPError, ValueError) as error:
            row["broken"] = repr(error)
        row["seconds"] = time.perf_counter() - began
        messages.append({"role": "assistant", "content": row["text"]})


async def chats(
    url: str, users: int, turns: int, told: list | None = None, stream: bool = True
) -> list[dict[str, Any]]:
    """Run every user's chat, AT_ONCE at a time; return the requests' rows."""
    told, waiting = [] if told is None else told, list(range(users))
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one() -> None:
            while waiting:
                await chat(client, waiting.pop(0), turns, told, stream)

        await asyncio.gather(*(one() for _ in range(AT_ONCE)))
    return told


def decoded(bundle: Path, users: list[int], turns: int) -> tuple[dict[tuple[int, int], str], list[Took]]:
    """Decode users' chats with one engine of one thread; return the texts, and what took how long.

    1, 2 and 4 chats run at once, turn by turn. In every second group caches help nobody, by salts, so that whole
    prompts are read.
    """
    texts, took, left, number = dict[tuple[int, int], str](), list[Took](), list(users), 0
    with Engine.load(bundle, batch_size=max(CROWDS), threads=1, chat_template=TEMPLATE) as engine:
        while left:
            number, size = number + 1, CROWDS[number % len(CROWDS)]
            group, left = left[:size], left[size:]
            messages = [[{"role": "system", "content": SYSTEM}] for _ in group]
            for turn in range(turns):
                params, salt = list[SamplingParams](), f"{number} {turn}" if number % 2 else None
                for user, told in zip(group, messages, strict=True):
                    told.append({"role": "user", "content": asked(user, turn)})
                    params.append(SamplingParams(TOKENS, temperature=0.8, seed=seed_of(user, turn), cache_salt=salt))
                results = engine.generate([Chat(list(told)) for told in messages], params)
                for user, told, result in zip(group, messages, results, strict=True):
                    texts[user, turn] = result.text
                    told.append({"role": "assistant", "content": result.text})
                timed = [result.metrics for result in results]
                last = max(timed, key=lambda each: each.first_token)
                read = sum(each.num_prompt_tokens - each.num_cached_tokens for each in timed)
                began = min(each.submitted for each in timed)
                took.append((len(group), read, last.first_token - began, last.tpot))
    return texts, took


def alone(bundle: Path, users: int, turns: int) -> tuple[dict[tuple[int, int], str], dict[str, Any]]:
    """Decode the same chats with two engines side by side, without a server.

    Returns:
        The texts, and an engine's times while the other core is as busy: `prompt`, seconds per prompt token, and
        `token`, pairs of how many chats ran at once and seconds per token.
    """
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        halves = pool.starmap(decoded, [(bundle, list(range(users))[half::2], turns) for half in (0, 1)])
    took = [each for _, half in halves for each in half]
    sizes = sorted({size for size, *_ in took})
    token = [(size, statistics.fmean(tpot for many, _, _, tpot in took if many == size)) for size in sizes]
    prompt = sum(seconds for _, _, seconds, _ in took) / sum(read for _, read, *_ in took)
    return halves[0][0] | halves[1][0], {"prompt": prompt, "token": token}


def summary(rows: list[dict[str, Any]], texts: dict[tuple[int, int], str]) -> dict[str, Any]:
    """Summarize a run: answered requests, texts equal to one engine's, the hit rate of prompt tokens, and times."""
    done = [row for row in rows if row["done"] and "error" not in row]
    right = [row for row in done if texts[row["user"], row["turn"]] == row["text"]]
    later = [row for row in done if "prompt" in row]
    times = sorted(row["ttft"] for row in done if "ttft" in row)
    first = {"ttft_median": statistics.median(times), "ttft_p99": times[int(0.99 * (len(times) - 1))]} if times else {}
    return {
        "requests": len(rows),
        "answered": len(done),
        "texts_equal": len(right),
        "clean_errors": sum("error" in row or row.get("status", 200) >= 400 for row in rows if "broken" not in row),
        "broken": sum("broken" in row for row in rows),
        "hit_rate": round(sum(row["cached"] for row in later) / max(sum(row["prompt"] for row in later), 1), 4),
        **{name: round(seconds, 4) for name, seconds in first.items()},
        "seconds_median": round(statistics.median(row["seconds"] for row in done), 4),
        "by_replica": {
            name: sum(row.get("replica") == name for row in rows) for name in {row.get("replica") for row in rows}
        },
    }


def engines(metrics: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the replicas' engines' busy seconds, and the mean seconds of a request outside of them."""
    sums = {
        name: sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(f"specbuild:{name}{{"))
        for name in ("busy_seconds_total", "e2e_request_latency_seconds_sum", "e2e_request_latency_seconds_count")
    }
    busy, inside, count = sums.values()
    return {
        "busy": round(busy, 2),
        "outside": round(statistics.fmean(row["seconds"] for row in rows) - inside / count, 4),
    }


def routings(
    bundle: Path, template: Path, users: int, ways: list[str], found: dict[str, Any], stream: bool = True
) -> dict[str, Any]:
    """Run all chats with each routing, and compare the texts with one engine's."""
    texts, found["engine"] = alone(bundle, users, TURNS)
    for routing in ways:
        with server(bundle, template, "--ray", "--num-replicas", "2", "--routing", routing) as (url, _):
            began = time.perf_counter()
            rows = asyncio.run(chats(url, users, TURNS, stream=stream))
            found[routing] = summary(rows, texts) | {"seconds": round(time.perf_counter() - began, 1)}
            found[routing] |= engines(httpx.get(f"{url}/metrics", timeout=60).text, rows)
            found[routing]["rows"] = [[row.get(name) for name in ROW] for row in rows]
            print(routing, {name: told for name, told in found[routing].items() if name != "rows"}, flush=True)
    found["prefix/random"] = round(found["prefix"]["hit_rate"] / found["random"]["hit_rate"], 2)
    return found


def death(bundle: Path, template: Path) -> dict[str, Any]:
    """Kill one of two replicas under load; return the outcomes of all requests, and of chats without a loss."""
    texts, _ = alone(bundle, 12, TURNS)
    with server(bundle, template, "--ray", "--num-replicas", "2") as (url, process):

        async def work() -> list[dict[str, Any]]:
            told: list[dict[str, Any]] = []
            working = asyncio.ensure_future(chats(url, 12, TURNS, told=told))
            while sum(row["done"] for row in told) < 40:
                await asyncio.sleep(0.05)
            us = psutil.Process(process.pid)
            victim = next(p for p in _tree(us) if "ServeReplica:specbuild:Replica" in " ".join(p.cmdline()))
            victim.send_signal(signal.SIGKILL)
            return await working

        rows = asyncio.run(work())
    # Without users who lost an answer, since their later prompts differ.
    lost = {row["user"] for row in rows if not row["done"] or "error" in row}
    kept = [row for row in rows if row["user"] not in lost]
    whole = summary(kept, texts)
    return {
        "requests": len(rows),
        "answered": sum(row["done"] and "error" not in row for row in rows),
        "clean_errors": sum("error" in row or row.get("status", 200) >= 400 for row in rows),
        "broken": sum("broken" in row for row in rows),
        "chats_without_a_loss": {"answered": whole["answered"], "texts_equal": whole["texts_equal"]},
    }


def _tree(process: psutil.Process) -> list[psutil.Process]:
    """Return Ray's processes: it detaches them, so all of this user's that began no earlier than the server's."""
    began = process.create_time()
    return [
        p for p in psutil.process_iter() if p.create_time() >= began and p.uids().real == os.getuid() and p.cmdline()
    ]


def zero(bundle: Path, template: Path) -> dict[str, Any]:
    """Let replicas scale to zero without requests and back with one; return the times."""
    with server(
        bundle, template, "--ray", "--autoscale", "0,2", "--downscale-delay-s", "2", "--upscale-delay-s", "0"
    ) as (url, _):
        found = dict[str, Any]()
        for attempt in ("first", "again"):
            began = time.perf_counter()
            (row,) = asyncio.run(chats(url, 1, 1))
            found[f"{attempt}_request_seconds"] = round(time.perf_counter() - began, 2)
            found[f"{attempt}_answered"] = row["done"]
            began = time.perf_counter()
            while httpx.get(f"{url}/load", timeout=60).json()["replicas"]:
                time.sleep(0.5)
                if time.perf_counter() - began > 120:
                    return found | {"at_zero": False}
            found[f"{attempt}_seconds_until_zero"] = round(time.perf_counter() - began, 1)
        return found | {"at_zero": True}


def overhead(bundle: Path, turns: int) -> dict[str, Any]:
    """Compare one replica with the plain server in turns: four requests at once, one thread each.

    Both are started STARTS times, since one start's engine may be a tenth faster than the next one's.
    """
    texts = (common.prompts() * 16)[:16]
    flags = ["--threads", "1", "--max-num-seqs", "4"]
    rows: dict[str, list[dict[str, float]]] = {"plain": [], "ray": []}
    for _ in range(STARTS):
        with server(bundle, None, *flags) as (plain, _), server(bundle, None, "--ray", *flags) as (ray, _):
            for turn in range(turns + 1):
                for name, url in (("plain", plain), ("ray", ray)):
                    told = asyncio.run(crowd(served(int(url.rpartition(":")[2])), texts, 4))
                    if turn:  # the first is a warm-up
                        rows[name].append(told)
    pairs = list(zip(rows["ray"], rows["plain"], strict=True))
    return rows | {name: round(statistics.median(r[name] / p[name] for r, p in pairs), 3) for name in rows["ray"][0]}


def main() -> int:
    """Run the chosen parts, and print and write their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "--wide", type=Path, help="for the overhead: a bundle whose steps take as long as a real model's"
    )
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--routings", default="random,prefix", help="of the chats; others stay as they were measured")
    parser.add_argument("--only", default="chats,whole,death,zero,overhead")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    random.seed(0)
    template = options.out.with_suffix(".jinja")
    template.write_text(TEMPLATE)
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    work = {
        "chats": lambda: routings(
            options.bundle, template, options.users, options.routings.split(","), found.get("chats", {})
        ),
        "whole": lambda: routings(
            options.wide or options.bundle, template, options.users, ["random", "prefix"], {}, False
        ),
        "death": lambda: death(options.bundle, template),
        "zero": lambda: zero(options.bundle, template),
        "overhead": lambda: {
            each.name: overhead(each, options.turns) for each in (options.bundle, options.wide) if each
        },
    }
    for name in options.only.split(","):
        found[name] = work[name]() | {"machine": common.machine()}
        told = {
            key: {part: each for part, each in value.items() if part != "rows"} if isinstance(value, dict) else value
            for key, value in found[name].items()
            if key != "machine"
        }
        print(name, json.dumps(told), flush=True)
        options.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    template.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
