"""Compare `auto` with plain decoding where requests arrive at the same times, however fast either of them answers.

python benchmarks/equal_arrivals.py --out FILE --bundle NAME=PATH[,chat] … [--concurrency 4] [--pairs 20] [--only REGEX]

A cell is a bundle, a temperature and a load: requests arrive as a Poisson process, at that share of the rate at which
plain decoding serves when all slots are full. A pair has six requests for each slot, of 32 to 96 tokens, once for each
way, the ways in alternating order. Ratios are of `auto`'s seconds over plain decoding's: of a request's time per token
(TPOT) and until its first token (TTFT), which includes its wait for a slot. Cells that are in FILE are skipped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import machine
from never_slower import NEW_TOKENS, PAUSE, TEMPERATURES, WAKE, WAYS, asked_of, bootstrap, named, quantile

from specbuild.runtime import Engine, LoadOptions, SamplingParams

LOADS = (0.6, 0.8)
EACH = 6  # requests of a pair for each slot
ENGINES = 5  # of each way, one after another: one may be a tenth faster than the next
Seen = dict[str, list[tuple[float, float]]]  # by way: TPOT and TTFT of each request of a pair


def serve(engine: Engine, texts: Sequence[str], params: Sequence[SamplingParams], at: Sequence[float]) -> Any:
    """Submit requests at the given times, in seconds from now; return their results."""
    began, handles = time.perf_counter(), []
    for text, given, when in zip(texts, params, at, strict=True):
        time.sleep(max(began + when - time.perf_counter(), 0))
        handles.append(engine.submit(text, given))
    return [handle.result() for handle in handles]


def requests(
    texts: Sequence[str], number: int, count: int, temperature: float
) -> tuple[list[str], list[SamplingParams]]:
    """Return a pair's prompts and sampling parameters, plain ones."""
    drawn = random.Random(number)
    chosen = [divmod(number * count + place, len(texts)) for place in range(count)]
    plain = SamplingParams(NEW_TOKENS, temperature=temperature, seed=number, speculation="off", ignore_eos=True)
    lengths = [drawn.randint(NEW_TOKENS // 2, NEW_TOKENS + NEW_TOKENS // 2) for _ in chosen]
    salted = zip(lengths, chosen, strict=True)
    return [texts[at] for _, at in chosen], [
        replace(plain, max_new_tokens=n, cache_salt=f"asked {times} times") for n, (times, _) in salted
    ]


def served(engine: Engine, way: str, given: tuple[list[str], list[SamplingParams]]) -> float:
    """Return how many requests an engine answers a second, all of them asked at once."""
    texts, params = given
    began = time.perf_counter()
    engine.generate(texts, [replace(each, speculation=way) for each in params])
    return len(texts) / (time.perf_counter() - began)


def cell(path: Path, texts: list[str], size: int, temperature: float, load: float, pairs: int) -> dict[str, Any]:
    """Run a cell's pairs; return the rate of arrivals, and `auto`'s times over plain decoding's."""
    seen, count, rate, options = list[Seen](), EACH * size, 0.0, LoadOptions(batch_size=size, prefix_caching=False)
    for first in range(0, pairs, in_one := math.ceil(pairs / ENGINES)):
        with ExitStack() as stack:
            engines = {way: stack.enter_context(Engine.load(path, options)) for way in WAYS}
            asked = requests(texts, pairs, count, temperature)
            rates = {way: served(engine, way, asked) for way, engine in engines.items()}  # it also binds their buffers
            rate = rate or load * rates["off"]
            for number in range(first, min(first + in_one, pairs)):
                drawn, (chosen, params) = random.Random(number), requests(texts, number, count, temperature)
                at = list(itertools.accumulate(drawn.expovariate(rate) for _ in chosen))
                seen.append({way: timed(engines[way], way, chosen, params, at) for way in WAYS[:: (-1) ** number]})
    return {"requests_per_s": rate, "pairs": pairs} | summary(seen)


def timed(
    engine: Engine, way: str, texts: list[str], params: list[SamplingParams], at: Sequence[float]
) -> list[tuple[float, float]]:
    """Return TPOT and TTFT of each request of a pair, in one of the ways."""
    time.sleep(PAUSE)
    asked = [replace(each, speculation=way) for each in params]
    engine.generate(texts[: len(texts) // EACH], replace(asked[0], max_new_tokens=WAKE))
    times = [(each.metrics, len(each.token_ids) - 1) for each in serve(engine, texts, asked, at)]
    return [((m.finished - m.first_token) / n, m.first_token - m.submitted) for m, n in times]


def summary(seen: Sequence[Seen]) -> dict[str, Any]:
    """Return `auto`'s times over plain decoding's, with the intervals of the mean and of p99."""
    found = dict[str, Any]()
    for part, name in enumerate(("tpot", "ttft")):

        def over(runs: Sequence[Seen], share: float | None, part: int = part) -> float:
            auto, off = ([each[part] for run in runs for each in run[way]] for way in ("auto", "off"))
            if share is None:
                return statistics.fmean(auto) / statistics.fmean(off)
            return quantile(auto, share) / quantile(off, share)

        for key, share in (("mean", None), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
            found[f"{name}_{key}"] = over(seen, share)
            if share in (None, 0.99):
                found[f"{name}_{key}_interval"] = bootstrap(seen, lambda runs, s=share: over(runs, s))
    return found


def main() -> None:
    """Run the missing cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bundle", action="append", required=True, metavar="NAME=PATH[,chat]")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose name has this")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=20)
    asked = parser.parse_args()
    result: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {"cells": {}}
    for given in asked.bundle:
        name, path, kind = named(given)
        for temperature, load in itertools.product(TEMPERATURES, LOADS):
            label = f"{name} concurrency={asked.concurrency} temperature={temperature} load={load}"
            if label in result["cells"] or not re.search(asked.only, label):
                continue
            found = cell(path, asked_of(kind), asked.concurrency, temperature, load, asked.pairs)
            result["cells"][label] = found
            asked.out.write_text(json.dumps({"machine": machine()} | result, indent=2) + "\n", encoding="utf-8")
            print(label, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
