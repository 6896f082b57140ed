"""Compare `auto` with plain decoding where requests arrive at the same times, however fast either of them answers.

python benchmarks/equal_arrivals.py --out FILE --bundle NAME=PATH[,chat] … [--concurrency 4] [--pairs 20] [--only REGEX]
    [--loads 10] [--one-engine] [--control]

A cell is a bundle, a temperature and a load: requests arrive as a Poisson process, at that share of the rate at which
plain decoding serves when all slots are full. A pair has six requests for each slot, of 32 to 96 tokens, once for each
way, the ways in alternating order. Ratios are of `auto`'s seconds over plain decoding's: of a request's time per token
(TPOT) and until its first token (TTFT), which includes its wait for a slot. With --control the second way decodes
plainly too: what the machine's noise alone makes of them. Cells that are in FILE are skipped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import (
    TEMPERATURES,
    WAYS,
    asked_of,
    awake,
    bootstrap,
    keep,
    known,
    loaded,
    named,
    options,
    over,
    requests,
    ways_of,
)

from specbuild.runtime import Engine, LoadOptions, SamplingParams

LOADS = (0.6, 0.8)
EACH = 6  # requests of a pair for each slot
TRIES = 3  # runs of which the quickest says how many requests full slots answer
Seen = dict[str, list[tuple[float, float]]]  # by way: TPOT and TTFT of each request of a pair


def serve(engine: Engine, texts: Sequence[str], params: Sequence[SamplingParams], at: Sequence[float]) -> Any:
    """Submit requests at the given times, in seconds from now; return their results."""
    began, handles = time.perf_counter(), []
    for text, given, when in zip(texts, params, at, strict=True):
        time.sleep(max(began + when - time.perf_counter(), 0))
        handles.append(engine.submit(text, given))
    return [handle.result() for handle in handles]


def capacity(engine: Engine, texts: Sequence[str], params: Sequence[SamplingParams], size: int) -> float:
    """Return how many requests `size` full slots answer a second, once the steps' buffers are bound.

    All requests are asked at once. Slots are full until fewer are left than there are slots; those are then half done.
    """
    found = [engine.submit(text, given) for text, given in zip(texts, params, strict=True)]
    times = [handle.result().metrics for handle in found]
    began, ended = min(m.submitted for m in times), sorted(m.finished for m in times)
    return (len(texts) - (size - 1) / 2) / (ended[-size] - began)


def cell(
    path: Path, texts: list[str], size: int, temperature: float, load: float, asked: argparse.Namespace
) -> dict[str, Any]:
    """Run a cell's pairs; return the mean rate of arrivals, and `auto`'s times over plain decoding's.

    Args:
        path: The bundle.
        texts: The prompts.
        size: The number of slots.
        temperature: The sampling temperature.
        load: The share of what plain decoding can serve.
        asked: The options `pairs`, `loads`, `one_engine` and `control`.
    """
    seen, count, rates, ways = list[list[Seen]](), EACH * size, list[float](), ways_of(asked.control)
    options = LoadOptions(batch_size=size, prefix_caching=False)
    for engines, numbers in loaded(path, options, asked):
        seen.append([])
        chosen, params = requests(texts, asked.pairs, count, temperature)
        for way, engine in engines.items():  # the first step of each shape binds its buffers
            engine.generate(chosen, [replace(each, speculation=ways[way]) for each in params])
        rates.append(load * max(capacity(engines["off"], chosen, params, size) for _ in range(TRIES)))
        for number in numbers:
            drawn, (chosen, params) = random.Random(number), requests(texts, number, count, temperature)
            at = list(itertools.accumulate(drawn.expovariate(rates[-1]) for _ in chosen))
            order = WAYS[:: (-1) ** number]
            seen[-1].append({way: timed(engines[way], ways[way], chosen, params, at) for way in order})
    return {"requests_per_s": statistics.fmean(rates), "pairs": asked.pairs} | summary(seen)


def timed(
    engine: Engine, speculation: str, texts: list[str], params: list[SamplingParams], at: Sequence[float]
) -> list[tuple[float, float]]:
    """Return TPOT and TTFT of each request of a pair, in one of the ways."""
    asked = [replace(each, speculation=speculation) for each in params]
    awake(engine, texts[: len(texts) // EACH], asked[0])
    times = [(each.metrics, len(each.token_ids) - 1) for each in serve(engine, texts, asked, at)]
    return [((m.finished - m.first_token) / n, m.first_token - m.submitted) for m, n in times]


def summary(loads: Sequence[Sequence[Seen]]) -> dict[str, Any]:
    """Return `auto`'s times over plain decoding's, with the intervals of the mean and of p99."""
    found = dict[str, Any]()
    for part, name in enumerate(("tpot", "ttft")):
        pairs = [[{way: [e[part] for e in times] for way, times in pair.items()} for pair in load] for load in loads]
        for key, share in (("mean", None), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            found[f"{name}_{key}"] = over(list(itertools.chain(*pairs)), share)
            if share in (None, 0.99):
                found[f"{name}_{key}_interval"] = bootstrap(pairs, lambda drawn, s=share: over(drawn, s))
    return found


def main() -> None:
    """Run the missing cells."""
    parser = options(__doc__, pairs=20)
    parser.add_argument("--concurrency", type=int, default=4)
    asked = parser.parse_args()
    result = known(asked.out)
    for given in asked.bundle:
        name, path, kind = named(given)
        for temperature, load in itertools.product(TEMPERATURES, LOADS):
            label = f"{name} concurrency={asked.concurrency} temperature={temperature} load={load}"
            if label in result["cells"] or not re.search(asked.only, label):
                continue
            found = cell(path, asked_of(kind), asked.concurrency, temperature, load, asked)
            keep(asked.out, result, label, found)
            print(label, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
