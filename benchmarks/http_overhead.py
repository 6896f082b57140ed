"""Measure the cost of HTTP: `specbuild serve` against `AsyncEngine` in the client's process, in turns.

python benchmarks/http_overhead.py [BUNDLE] [--requests 32] [--turns 5] --out FILE

The default bundle is the reference pair's with the widened target. Every request streams 64 tokens; gaps are between a
stream's chunks as the client sees them. Each process has its own engine, and one of the two is idle in each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import common

from specbuild.runtime import AsyncEngine, SamplingParams

CONCURRENCY = (1, 4, 16)
NEW_TOKENS = 64
SEQUENCES = 4
Stream = Callable[[str], AsyncIterator[int]]  # prompt → the number of tokens in each chunk


async def crowd(stream: Stream, prompts: list[str], concurrency: int) -> dict[str, float]:
    """Run all prompts, `concurrency` at a time; return tokens per second and the median gap between chunks in seconds.

    Args:
        stream: Streams the tokens of a prompt.
        prompts: The prompts.
        concurrency: Requests at a time.
    """
    waiting, gaps, tokens = list(prompts), list[float](), 0

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


def served(port: int) -> Stream:
    """Return a stream from a server, read from a bare socket to keep the client's cost low."""
    asked = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}

    async def stream(prompt: str) -> AsyncIterator[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({**asked, "prompt": prompt}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        async for line in reader:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield len(choice["token_ids"])
        writer.close()

    return stream


async def measure(bundle: Path, port: int, requests: int, turns: int) -> dict[str, Any]:
    """Return, by concurrency, the figures of each contender in each turn."""
    texts = (common.prompts() * requests)[:requests]
    found: dict[str, Any] = {}
    async with await AsyncEngine.load(bundle, batch_size=SEQUENCES) as engine:
        contenders = {"engine": embedded(engine), "server": served(port)}
        for stream in contenders.values():
            await crowd(stream, texts[:SEQUENCES], SEQUENCES)
        for concurrency in CONCURRENCY:
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
            for turn in range(turns):
                for name in sorted(contenders, reverse=bool(turn % 2)):
                    rows[name].append(await crowd(contenders[name], texts, concurrency))
            found[str(concurrency)] = rows | {"server/engine": ratios(rows)}
    return found


def ratios(rows: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return the server's figures over the engine's: medians of the turns' ratios."""
    pairs = list(zip(rows["server"], rows["engine"], strict=True))
    return {name: round(statistics.median(s[name] / e[name] for s, e in pairs), 4) for name in rows["engine"][0]}


def main() -> int:
    """Print the ratios, and write everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    bundle = options.bundle or common.bundles(common.ROOT / "benchmarks" / "out")["wide"]
    flags = ["--port", "0", "--max-num-seqs", str(SEQUENCES)]
    command = [str(Path(sys.executable).parent / "specbuild"), "serve", str(bundle), *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        port = 0
        for line in server.stderr:
            told = json.loads(line)["message"]
            if told.startswith("serving at "):
                port = int(told.rpartition(":")[2])
                break
        threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop the server
        found = asyncio.run(measure(bundle, port, options.requests, options.turns))
        server.terminate()
    result = {"command": " ".join(["python", *sys.argv]), "machine": common.machine(), "concurrency": found}
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for concurrency, rows in found.items():
        print(concurrency, rows["server/engine"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
