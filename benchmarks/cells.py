"""Cells: what benchmarks share that compare `auto` with plain decoding in pairs, one after the other.

A cell is one setting, say a bundle, a concurrency and a temperature. Cells that are in the result are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import ROOT, machine, prompts

from specbuild.runtime import Engine, LoadOptions, SamplingParams

TEMPERATURES = (0.0, 0.8)
NEW_TOKENS = 64
RESAMPLES = 2000
WAYS = ("off", "auto")
PAUSE, WAKE = 0.1, 8  # seconds in which the other way's threads fall asleep, and tokens that wake this one's


def options(description: str | None, pairs: int) -> argparse.ArgumentParser:
    """Return a parser with the options of benchmarks that run in cells; `pairs`: the default number of pairs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bundle", action="append", required=True, metavar="NAME=PATH[,chat]")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose name has this")
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--loads", type=int, default=10, help="of both engines, each with as many of the pairs")
    parser.add_argument("--one-engine", action="store_true", help="for both ways: loads differ more than they do")
    parser.add_argument("--control", action="store_true", help="plain decoding in both ways")
    return parser


def ways_of(control: bool) -> dict[str, str]:
    """Return by way what its requests ask for as `speculation`; in a control both decode plainly."""
    return {"off": "off", "auto": "off" if control else "auto"}


def known(out: Path) -> dict[str, Any]:
    """Return the result so far; `machine`: facts on that of its first cell."""
    if not out.exists():
        return {"machine": machine(), "cells": {}}
    return json.loads(out.read_text(encoding="utf-8"))


def keep(out: Path, result: dict[str, Any], label: str, cell: dict[str, Any]) -> None:
    """Add a cell to the result and write it; of another machine, commit or command the cell has the facts itself."""
    told = machine()
    result["cells"][label] = cell if told == result["machine"] else cell | {"machine": told}
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def asked_of(kind: str) -> list[str]:
    """Return the prompts: "code" for the reference pair, which knows only Python, or those of kinds.jsonl."""
    if kind == "code":
        return prompts()
    lines = (ROOT / "tests" / "data" / "kinds.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [each.get("prompt") or each["messages"][0]["content"] for each in found]


def named(given: str) -> tuple[str, Path, str]:
    """Return name, path and kind of prompts of a bundle, given as NAME=PATH[,chat]."""
    name, _, where = given.partition("=")
    path, _, kind = where.partition(",")
    return name, Path(path), kind or "code"


def bootstrap(loads: Sequence[Sequence[Any]], statistic: Callable[[Sequence[Any]], float]) -> list[float]:
    """Return the 95 % bootstrap interval of a statistic of all loads' items.

    Whole loads are drawn, because the pairs of one load are alike: a load may be a tenth faster than the next.
    """
    drawn, flat = random.Random(0), itertools.chain.from_iterable
    found = sorted(statistic(list(flat(drawn.choices(loads, k=len(loads))))) for _ in range(RESAMPLES))
    return [found[int(RESAMPLES * share)] for share in (0.025, 0.975)]


def interval(loads: Sequence[Sequence[float]]) -> list[float]:
    """Return the 95 % bootstrap interval of the geometric mean of the ratios of all loads' pairs."""
    return bootstrap(loads, statistics.geometric_mean)


def quantile(values: list[float], share: float) -> float:
    """Return a quantile of the values."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def over(pairs: Sequence[dict[str, list[float]]], share: float | None = None) -> float:
    """Return `auto`'s mean of all pairs' values over plain decoding's; with a share, that of the ways' quantiles."""
    off, auto = ([each for pair in pairs for each in pair[way]] for way in WAYS)
    if share is None:
        return statistics.fmean(auto) / statistics.fmean(off)
    return quantile(auto, share) / quantile(off, share)


def requests(
    texts: Sequence[str], number: int, count: int, temperature: float
) -> tuple[list[str], list[SamplingParams]]:
    """Return the prompts and sampling parameters of a pair, plain ones, from its number.

    A prompt's repetitions have salts, which separate caches: nothing is drafted from answers with another salt.
    """
    drawn, places = random.Random(number), [divmod(number * count + at, len(texts)) for at in range(count)]
    plain = SamplingParams(NEW_TOKENS, temperature=temperature, seed=number, speculation="off", ignore_eos=True)
    lengths = [drawn.randint(NEW_TOKENS // 2, NEW_TOKENS + NEW_TOKENS // 2) for _ in places]
    each = zip(lengths, places, strict=True)
    salted = [replace(plain, max_new_tokens=n, cache_salt=f"asked {times} times") for n, (times, _) in each]
    return [texts[at] for _, at in places], salted


def awake(engine: Engine, texts: Sequence[str], params: SamplingParams) -> None:
    """Wait for the other way's threads to fall asleep, and wake this one's; later requests draft nothing from that."""
    time.sleep(PAUSE)
    engine.generate(list(texts), replace(params, max_new_tokens=WAKE, cache_salt=None))


def loaded(path: Path, options: LoadOptions, asked: argparse.Namespace) -> Iterator[tuple[dict[str, Engine], range]]:
    """Yield the engines of both ways, loaded `loads` times, each time with the numbers of the pairs that they run.

    Each way's engine is the first loaded in every second load: which is faster may be a matter of that. With
    `one_engine` both ways have the same.
    """
    for first in range(0, asked.pairs, in_one := math.ceil(asked.pairs / asked.loads)):
        with ExitStack() as stack:
            order = WAYS if first // in_one % 2 else WAYS[::-1]
            one = stack.enter_context(Engine.load(path, options))
            other = one if asked.one_engine else stack.enter_context(Engine.load(path, options))
            engines = dict(zip(order, (one, other), strict=True))
            yield engines, range(first, min(first + in_one, asked.pairs))
