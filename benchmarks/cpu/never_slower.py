"""Compare `auto` with plain decoding in turns: by bundle, concurrency and temperature, alone and beside a busy process.

python -m benchmarks.cpu.never_slower --out FILE --bundle NAME=PATH[,chat] … [--only REGEX] [--pairs 30] [--loads 10]
    [--turnover 3] [--min-expected-speedup 1] [--no-resident] [--one-engine] [--control] [--prompt-tokens 900]

A cell is a bundle, a concurrency and a temperature. A pair decodes the same requests in both ways, one after the other
in alternating order; its ratio is plain seconds over `auto`'s. A pair has --turnover requests for each slot, of 32 to
96 tokens, so that the next one begins where one ends, as in serving, and not all slots at once. Requests are pycode's
prompts, or with PATH,chat those of `tests/data/kinds.jsonl`, category by category. In `busy` cells another process
keeps a core busy during the second half of the pairs. With --min-expected-speedup 1000 `auto` drafts in rows that are
free alone: what deciding, resting and looking cost. With --no-resident a GPU's rounds wait for the host, both ways.
With --one-engine one engine decodes in both ways: what the policy costs, without what loads differ by. With --control
the second way decodes plainly too: what the machine's noise alone makes of each figure. The cell "prompt" has the gaps
of two requests while the prompt of a third, of --prompt-tokens, is read. Cells that are already in FILE are skipped, so
the benchmark can run in pieces; after --seconds no further cell begins.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import bootstrap, chats, interval, machine, parser, prompts, quantile, rounded, save
from benchmarks.cpu.pairs import NEW_TOKENS, WAYS, awake, loaded, over, requests
from specbuild.runtime import Engine, Limits, LoadOptions, SamplingParams
from specbuild.runtime.errors import OptionError

CONCURRENCIES = (1, 2, 4)
CROWDS = (8, 16)
TEMPERATURES = (0.0, 0.8)
SLOW = 0.98  # a cell whose interval ends below this is slower than plain decoding
_SPIN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with the benchmark


@contextmanager
def spinning(busy: bool) -> Iterator[None]:
    """Keep a core busy with another process inside the block, if `busy`."""
    process = subprocess.Popen([sys.executable, "-c", _SPIN]) if busy else None
    try:
        yield
    finally:
        if process:
            process.kill()
            process.wait()


class Timed:
    """A timed run of concurrent requests: seconds in all, and when each chunk of each request came."""

    def __init__(self, engine: Engine, texts: Sequence[Any], params: SamplingParams | list[SamplingParams]) -> None:
        self.arrivals, self.tokens = [list[float]() for _ in texts], [0 for _ in texts]
        began = time.perf_counter()
        for chunk in engine.stream(list(texts), params):
            self.arrivals[chunk.index].append(time.perf_counter())
            if chunk.result:
                if chunk.result.error:
                    raise chunk.result.error
                self.tokens[chunk.index] = len(chunk.result.token_ids)
        self.seconds = time.perf_counter() - began

    def gaps(self) -> list[float]:
        """Return the seconds between successive chunks of each request."""
        return [later - first for each in self.arrivals for first, later in itertools.pairwise(each)]

    def tpots(self) -> list[float]:
        """Return each request's mean seconds per token after its first chunk."""
        both = zip(self.arrivals, self.tokens, strict=True)
        return [(each[-1] - each[0]) / (tokens - 1) for each, tokens in both if len(each) > 1]


def cell(
    path: Path, texts: list[str], size: int, temperature: float, busy: bool, options: argparse.Namespace
) -> dict[str, Any]:
    """Run a cell's pairs and return their ratios and tails.

    Args:
        path: The bundle.
        texts: The prompts.
        size: The concurrency.
        temperature: The sampling temperature.
        busy: Whether another process keeps a core busy during the second half.
        options: The options `pairs`, `turnover` (a pair's requests for each slot), `loads`, `one_engine`,
            `min_expected_speedup`, `no_resident` and `control`.
    """
    limits, loads = Limits(min_expected_speedup=options.min_expected_speedup), list[list[dict[str, Timed]]]()
    speculation = {"off": "off", "auto": "off" if options.control else "auto"}
    resident = False if options.no_resident else None
    load = LoadOptions(batch_size=size, prefix_caching=False, limits=limits, resident=resident)
    for engines, numbers in loaded(path, load, options):
        loads.append([])
        for way, engine in engines.items():  # warm-up: the first step of each shape binds its buffers
            params = SamplingParams(16, temperature=temperature, ignore_eos=True, speculation=speculation[way])
            engine.generate(texts[:size], params)
        for number in numbers:
            chosen, plain = requests(texts, number, size * options.turnover, temperature)
            found = dict[str, Timed]()
            with spinning(busy and number >= options.pairs // 2):
                for way in WAYS if number % 2 else WAYS[::-1]:
                    given = [replace(each, speculation=speculation[way]) for each in plain]
                    awake(engines[way], chosen[:size], given[0])
                    found[way] = Timed(engines[way], chosen, given)
            loads[-1].append(found)
        correction = engines["auto"].correction
    return summary(loads) | {"correction": correction}


def summary(loads: list[list[dict[str, Timed]]]) -> dict[str, Any]:
    """Return a cell's row: plain seconds over `auto`'s, and `auto`'s tails over plain decoding's, with intervals.

    `tpot_p99` is of the requests of all pairs, `longest_gap` the mean ratio of each pair's longest gaps; after either
    stands its interval.
    """

    def of(value: Callable[[Any], Any]) -> list[list[Any]]:
        return [[value(pair) for pair in load] for load in loads]

    flat = itertools.chain.from_iterable
    ratios = of(lambda pair: pair["off"].seconds / pair["auto"].seconds)
    tpots = of(lambda pair: {way: run.tpots() for way, run in pair.items()})
    gaps = of(lambda pair: {way: run.gaps() for way, run in pair.items()})
    longest = [[over([each], 1.0) for each in load if all(each.values())] for load in gaps]  # no gap: one chunk
    return {
        "pairs": sum(map(len, loads)),
        "loads": len(loads),
        "plain_tokens_per_s": statistics.median(flat(of(lambda pair: sum(pair["off"].tokens) / pair["off"].seconds))),
        "ratio": statistics.geometric_mean(flat(ratios)),
        "interval": interval(ratios),
        "tpot_p99": [over(list(flat(tpots)), 0.99), *bootstrap(tpots, lambda pairs: over(pairs, 0.99))],
        "longest_gap": [statistics.geometric_mean(flat(longest)), *interval(longest)],
    }


def prompt_cell(path: Path, texts: list[str], long: int, turns: int) -> dict[str, Any]:
    """Return the p99 gap of two decoding requests during a third one's long prefill, over that without it.

    Each turn is run in both ways, in alternating order, and no run is drafted from the texts of another.

    Args:
        path: The bundle.
        texts: The prompts.
        long: Tokens of the long prompt.
        turns: The number of turns.
    """
    gaps: dict[bool, list[float]] = {False: [], True: []}
    with Engine.load(path, batch_size=4, prefix_caching=False) as engine:
        one = engine.encode("\n".join(texts)[: 2 * long])
        prompt = (one * (1 + long // len(one)))[:long]
        for number, disturbed in ((n, bool(n % 2) is first) for n in range(turns) for first in (False, True)):
            params = SamplingParams(NEW_TOKENS, ignore_eos=True, cache_salt=f"{number} {disturbed}")
            chosen = [engine.encode(texts[(2 * number + at) % len(texts)]) for at in range(2)]
            found = Timed(engine, [*chosen, *([prompt] if disturbed else [])], params)
            end = found.arrivals[2][0] if disturbed else math.inf  # its first token ends the prefill
            pairs = [each for arrivals in found.arrivals[:2] for each in itertools.pairwise(arrivals)]
            gaps[disturbed] += [later - first for first, later in pairs if first < end]
    tails = {name: quantile(gaps[name], 0.99) for name in gaps}
    return {"tokens": long, "turns": turns, "p99_ratio": tails[True] / tails[False], "p99_s": tails[True]}


def cells(given: str, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield every cell of a bundle, given as NAME=PATH[,chat]: its name in the result, and a function that runs it."""
    name, _, where = given.partition("=")
    place, _, kind = where.partition(",")
    path, texts = Path(place), chats() if kind == "chat" else prompts()
    for size, temperature, busy in itertools.product(CONCURRENCIES, TEMPERATURES, (False, True)):
        label = f"{name} concurrency={size} temperature={temperature}{' busy' if busy else ''}"
        yield label, lambda s=size, t=temperature, b=busy: cell(path, texts, s, t, b, options)  # type: ignore[misc]
    yield f"{name} prompt", lambda: prompt_cell(path, texts, options.prompt_tokens, max(options.pairs // 3, 2))
    for size in CROWDS:
        label = f"{name} concurrency={size} temperature=0.0"
        yield label, lambda s=size: cell(path, texts, s, 0.0, False, options)  # type: ignore[misc]


def keep(out: Path, result: dict[str, Any], label: str, row: dict[str, Any]) -> None:
    """Add a cell to the result and write it; the row has its machine's number, for a run may go on elsewhere."""
    here = machine()
    command = here.pop("command")
    for name, value in (("machines", here), ("commands", command)):
        if value not in result[name]:
            result[name].append(value)
    result["cells"][label] = rounded(row) | {"machine": result["machines"].index(here)}
    save(out, result)


def options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    found = parser(__doc__, None)
    found.add_argument("--bundle", action="append", required=True, metavar="NAME=PATH[,chat]")
    found.add_argument("--only", default="", metavar="REGEX", help="cells whose name has this")
    found.add_argument("--pairs", type=int, default=30)
    found.add_argument("--loads", type=int, default=10, help="of both engines, each with as many of the pairs")
    found.add_argument("--one-engine", action="store_true", help="for both ways: loads differ more than they do")
    found.add_argument("--control", action="store_true", help="plain decoding in both ways")
    found.add_argument("--turnover", type=int, default=3)
    found.add_argument("--min-expected-speedup", type=float, default=1.0)
    found.add_argument("--prompt-tokens", type=int, default=900, help="of the cell named 'prompt'")
    found.add_argument("--no-resident", action="store_true")
    found.add_argument("--seconds", type=float, default=math.inf)
    return found.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the missing cells while there is time; return 1 if a cell is surely slower than plain decoding."""
    given, began = options(arguments), time.perf_counter()
    empty: dict[str, Any] = {"machines": [], "commands": [], "cells": {}}
    result = json.loads(given.out.read_text()) if given.out.exists() else empty
    wanted = (each for bundle in given.bundle for each in cells(bundle, given) if re.search(given.only, each[0]))
    for label, run in wanted:
        if label in result["cells"] or time.perf_counter() - began > given.seconds:
            continue
        try:
            row = run()
        except OptionError as error:  # the bundle was not built for this concurrency
            print(f"{label}: {error}", file=sys.stderr)
            continue
        keep(given.out, result, label, row)
        print(label, json.dumps(rounded(row)), flush=True)
    ratios = [each["ratio"] for each in result["cells"].values() if "ratio" in each]
    slow = [label for label, each in result["cells"].items() if each.get("interval", [1, 1])[1] < SLOW]
    print(f"{len(ratios)} cells, pooled {statistics.geometric_mean(ratios or [1.0]):.3f}; surely below {SLOW}: {slow}")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
