"""Measure the cost of HTTP: `specbuild serve` against `AsyncEngine` in the client's process, in turns.

python -m benchmarks.serve.http_overhead [BUNDLE] [--requests 32] [--turns 5] [--out FILE]

The default bundle is the reference pair's with the widened target. Every request streams 64 tokens; gaps are between a
stream's chunks as the client sees them. Each process has its own engine, and one of the two is idle in each turn.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from benchmarks.common import OUT, bundles, machine, median_ratios, parser, prompts, save, serving
from specbuild.runtime import AsyncEngine, SamplingParams

CONCURRENCY = (1, 4, 16)
NEW_TOKENS = 64
SEQUENCES = 4
Stream = Callable[[str], AsyncIterator[int]]  # prompt → the number of tokens in each chunk


async def crowd(stream: Stream, texts: list[str], concurrency: int) -> dict[str, float]:
    """Run all prompts, `concurrency` at a time; return tokens per second and the median gap between chunks in seconds.

    Args:
        stream: Streams the tokens of a prompt.
        texts: The prompts.
        concurrency: Requests at a time.
    """
    waiting, gaps, tokens = list(texts), list[float](), 0

    async def one() -> None:
        nonlocal tokens
        while waiting:
            last = None
            async for count in stream(waiting.pop()):
                now = time.perf_counter()
                tokens += count
                if last is not None:
                    gaps.append(now - last)
                last = now

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(concurrency)))
    seconds = time.perf_counter() - began
    return {"tokens_per_second": tokens / seconds, "median_gap": statistics.median(gaps)}


def embedded(engine: AsyncEngine) -> Stream:
    """Return a stream from an engine in this process."""
    params = SamplingParams(NEW_TOKENS, ignore_eos=True)

    async def stream(prompt: str) -> AsyncIterator[int]:
        async for chunk in engine.stream(prompt, params):
            yield len(chunk.token_ids)

    return stream


def served(url: str) -> Stream:
    """Return a stream from a server, read from a bare socket to keep the client's cost low."""
    asked = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}

    async def stream(prompt: str) -> AsyncIterator[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        body = json.dumps({**asked, "prompt": prompt}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        async for line in reader:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield len(choice["token_ids"])
        writer.close()

    return stream


async def measure(bundle: Path, url: str, requests: int, turns: int) -> dict[str, Any]:
    """Return, by concurrency, the server's figures over the engine's, and the medians of both."""
    texts = (prompts() * requests)[:requests]
    found: dict[str, Any] = {}
    async with await AsyncEngine.load(bundle, batch_size=SEQUENCES) as engine:
        contenders = {"engine": embedded(engine), "server": served(url)}
        for stream in contenders.values():
            await crowd(stream, texts[:SEQUENCES], SEQUENCES)
        for concurrency in CONCURRENCY:
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
            for turn in range(turns):
                for name in sorted(contenders, reverse=bool(turn % 2)):
                    rows[name].append(await crowd(contenders[name], texts, concurrency))
            found[str(concurrency)] = compared(rows, "server", "engine")
    return found


def compared(rows: dict[str, list[dict[str, float]]], one: str, other: str) -> dict[str, dict[str, float]]:
    """Return the medians of each contender's turns, and of the turns' ratios of one's figures over the other's."""
    medians = {
        who: {name: statistics.median(each[name] for each in turns) for name in turns[0]} for who, turns in rows.items()
    }
    return medians | {f"{one}/{other}": median_ratios(rows[one], rows[other])}


def main() -> None:
    """Measure, and write and print the rows."""
    options = parser(__doc__, OUT / "http-overhead.json")
    options.add_argument("bundle", type=Path, nargs="?")
    options.add_argument("--requests", type=int, default=32)
    options.add_argument("--turns", type=int, default=5)
    given = options.parse_args()
    bundle = given.bundle or bundles(OUT)["wide"]
    with serving(bundle, "--max-num-seqs", str(SEQUENCES)) as server:
        found = asyncio.run(measure(bundle, server.url, given.requests, given.turns))
    print(save(given.out, {"machine": machine(), "concurrency": found}))


if __name__ == "__main__":
    main()
