"""Compare what speculation saved by the ledger's estimate and by the clock: the same requests with and without it.

python benchmarks/cost_ab.py [--bundle PATH] [--requests 24] [--turns 4] [--tokens 64] [--at-once 1] --out FOLDER

A server keeps a ledger. A client sends the same requests in both ways, one after the other, in alternating order, and
times each itself. The ledger's rows of the requests that speculated, and the machine's hours, give an estimate of what
was saved; the difference of the client's times is what really was. The default bundle is the widened pair.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import httpx
from common import bundles, parser, prompts, save, specbuild

from specbuild.measure.cost.report import report
from specbuild.measure.cost.rows import Rows, read
from specbuild.measure.cost.spent import spend

PRICE = 3600.0  # per hour, so that a second costs one unit of money
WAYS = ("auto", "off")


def asked() -> Namespace:
    """Parse the command line."""
    found = parser(__doc__)
    found.add_argument("--bundle", type=Path)
    found.add_argument("--requests", type=int, default=24)
    found.add_argument("--turns", type=int, default=4)
    found.add_argument("--tokens", type=int, default=64)
    found.add_argument("--at-once", type=int, default=1)
    return found.parse_args()


async def send(client: httpx.AsyncClient, texts: Sequence[str], way: str, tokens: int) -> float:
    """Send requests at once, all in one way; return the seconds until the last has ended."""
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "speculation": way}

    async def one(text: str) -> None:
        salt = {"cache_salt": str(time.time_ns())}  # so that no prompt is cached from before
        (await client.post("/v1/completions", json=body | salt | {"prompt": text})).raise_for_status()

    began = time.perf_counter()
    await asyncio.gather(*map(one, texts))
    return time.perf_counter() - began


async def pairs(url: str, options: Namespace) -> list[dict[str, float]]:
    """Return the client's seconds of the same requests in each way, after a warm-up."""
    texts, found = prompts()[: options.requests], []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for way in WAYS:
            await send(client, texts[:4], way, 16)
        for number, at in product(range(options.turns), range(0, len(texts), options.at_once)):
            order = WAYS if (number + at // options.at_once) % 2 else WAYS[::-1]
            chosen = texts[at : at + options.at_once]
            found.append({way: await send(client, chosen, way, options.tokens) for way in order})
    return found


def served(bundle: Path, ledger: Path, options: Namespace) -> list[dict[str, float]]:
    """Run `pairs` against a server of the bundle that keeps a ledger."""
    given = ["--port", "0", "--max-num-seqs", str(options.at_once), "--ledger", str(ledger)]
    command = [str(Path(sys.executable).parent / "specbuild"), "serve", str(bundle), *given]
    process = subprocess.Popen([*command, "--price-per-hour", str(PRICE)], stderr=subprocess.PIPE, text=True)
    assert process.stderr
    try:
        for line in process.stderr:
            if "serving at " in line:
                url = json.loads(line)["message"].removeprefix("serving at ")
                return asyncio.run(pairs(url, options))
        raise SystemExit("the server ended before it served")
    finally:
        process.terminate()
        process.communicate()


def summary(rows: Rows, took: list[dict[str, float]], tokens: int) -> dict[str, Any]:
    """Return the estimate beside the measurement, and ratios that check the busy seconds.

    Args:
        rows: The ledger's rows.
        took: The client's seconds; see `pairs`.
        tokens: Output tokens of each request; rows with others, of the warm-up, do not count.
    """
    own = [row for row in rows.requests if row.output_tokens == tokens]
    plain = [row for row in own if row.speculation == "off"]
    found = report(spend(Rows([row for row in own if row.speculation != "off"], rows.machines)), ())["total"]
    seconds = {way: sum(each[way] for each in took) for way in WAYS}
    saved, estimated = seconds["off"] - seconds["auto"], found["saved"]
    drawn, gains = random.Random(0), [each["off"] - each["auto"] for each in took]
    sums = sorted(sum(drawn.choices(gains, k=len(gains))) for _ in range(2000))
    busy = sum(sum(row.busy_seconds.values()) for row in rows.machines)
    return {
        "seconds": seconds,
        "speedup": seconds["off"] / seconds["auto"],
        "saved_by_the_ledger": estimated,
        "saved_by_the_clock": {"value": saved, "low": sums[50], "high": sums[1949]},
        "ledger_over_clock": estimated["value"] / saved,
        "plain_seconds_estimated_over_busy_ones_measured": found["baseline_seconds"]
        / sum(r.busy_seconds for r in plain),
        "requests_busy_over_the_machines": sum(row.busy_seconds for row in rows.requests) / busy,
        "busy_over_the_clients_seconds": sum(row.busy_seconds for row in own) / sum(seconds.values()),
    }


def main() -> None:
    """Run the benchmark and write the result."""
    options = asked()
    options.out.mkdir(parents=True, exist_ok=True)
    bundle, load = options.bundle, os.getloadavg()[0]
    if bundle is None:
        bundle = bundles(options.out)["wide"]
        if not (bundle / "timings.json").exists():
            specbuild("tune", bundle)
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.jsonl"
        took = served(bundle, ledger, options)
        found = summary(read([ledger]), took, options.tokens)
    asked_for = {name: getattr(options, name) for name in ("requests", "turns", "tokens", "at_once")}
    save(options.out, "cost-ab", {"settings": asked_for, "load_before": load} | found)


if __name__ == "__main__":
    main()
