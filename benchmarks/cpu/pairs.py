"""Pairs: the same requests by `auto` and by plain decoding, one after the other."""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.common import quantile
from specbuild.runtime import Engine, LoadOptions, SamplingParams

NEW_TOKENS = 64
WAYS = ("off", "auto")
PAUSE, WAKE = 0.1, 8  # seconds in which the other way's threads fall asleep, and tokens that wake this one's


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


def loaded(path: Path, load: LoadOptions, options: argparse.Namespace) -> Iterator[tuple[dict[str, Engine], range]]:
    """Yield the engines of both ways, loaded `loads` times, each time with the numbers of the pairs that they run.

    Each way's engine is the first loaded in every second load: which is faster may be a matter of that. With
    `one_engine` both ways have the same.
    """
    for first in range(0, options.pairs, in_one := math.ceil(options.pairs / options.loads)):
        with ExitStack() as stack:
            order = WAYS if first // in_one % 2 else WAYS[::-1]
            one = stack.enter_context(Engine.load(path, load))
            other = one if options.one_engine else stack.enter_context(Engine.load(path, load))
            engines = dict(zip(order, (one, other), strict=True))
            yield engines, range(first, min(first + in_one, options.pairs))
