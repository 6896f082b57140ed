"""The ranking of a node's tokens by score, computed only as far as it is read."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from .cut_offs import CutOffs
from .noise import Noise
from .row import Logits, Row, Tokens

SMALL = 8192  # vocabulary up to which all noise is computed once per position: comparing per node would cost more
FEW = 512  # up to so many tokens are scored without comparing their noise first
DENSE = 8  # compare all noise if over one in so many tokens is likely; fewer are cheaper to gather
_ROUNDED = 2.0**-20  # relative to a score: more than the rounding of its noise and its sum


def contenders(row: Row, noise: Noise | None, least: float, left: Tokens | None = None) -> tuple[Tokens, Logits]:
    """Return all tokens with at least a given score, processed logit plus noise.

    A token is ruled out if its logit misses the score even with the largest noise, or its noise misses it even with the
    largest logit. Both tests are comparisons, and leave few tokens whose noise needs logarithms.

    Args:
        row: The node's logits.
        noise: The position's noise; None: none.
        least: The lowest score to return.
        left: The tokens to look at, ascending; None: all.

    Returns:
        The tokens, ascending, and their scores `float32`.
    """
    tokens = left
    if noise is None:
        tokens = row.reaching(least).nonzero()[0] if tokens is None else tokens
        scores = row.of(tokens)
    else:
        if tokens is None or tokens.size > max(FEW, noise.few):
            slack = _slack(least)
            loud = least - row.largest - slack
            if tokens is None:
                likely = row.reaching(least - noise.largest - slack)
                if np.count_nonzero(likely) * DENSE > likely.size and (both := noise.reaching(loud)) is not None:
                    likely &= both
                tokens = likely.nonzero()[0]
            if tokens.size > FEW and (reach := noise.reaching(loud, tokens)) is not None:
                tokens = tokens[reach]
        scores = row.of(tokens) + noise.of(tokens)
    kept = scores >= least
    return tokens[kept], scores[kept]


def ranking(
    row: Row, noise: Noise | None, cut_offs: CutOffs | None, misses: int | None = None, count: int = 1
) -> Iterator[tuple[int, float]]:
    """Yield tokens and scores, best first, the lowest id first among equals; none that is excluded or scores −∞.

    Args:
        row: The node's logits.
        noise: The position's noise; None: none.
        cut_offs: The cut-offs; None: none.
        misses: End after more than so many tokens that top-p excludes; None: never.
        count: How many tokens the caller expects to read; more are found too, but more slowly.
    """
    found = _ranked(row, noise, cut_offs, count + (misses or 0))
    if cut_offs is None or not cut_offs.cuts_mass:
        yield from found
        return
    out = -math.inf  # top-p excludes this logit and all lower ones
    for token, score in found:
        value = row.value(token)
        if value <= out:
            continue
        if cut_offs.in_top_p(value):
            yield token, score
        elif misses is None:
            out = value
        else:
            misses -= 1
            if misses < 0:
                return


def _ranked(row: Row, noise: Noise | None, cut_offs: CutOffs | None, count: int) -> Iterator[tuple[int, float]]:
    """Yield as `ranking` does, before top-p."""
    left = cut_offs.left if cut_offs else None
    if row.raw.size <= SMALL:
        yield from _one_by_one(row, noise, left)
        return
    looked = math.inf
    for least in _steps(row, noise, cut_offs, count):
        tokens, scores = contenders(row, noise, least, left)
        if looked < math.inf:
            fresh = scores < looked
            tokens, scores = tokens[fresh], scores[fresh]
        order = np.argsort(-scores, kind="stable")
        for token, score in zip(tokens[order].tolist(), scores[order].tolist(), strict=True):
            if score > -math.inf:
                yield token, score
        looked = least


def _one_by_one(row: Row, noise: Noise | None, left: Tokens | None) -> Iterator[tuple[int, float]]:
    """Yield as `_ranked` does, from the scores of all tokens."""
    if left is not None:
        scores = row.of(left) if noise is None else row.of(left) + noise.all[left]
    else:
        scores = row.all().copy() if noise is None else row.all() + noise.all
    while scores.size and (score := scores[best := int(scores.argmax())]) > -math.inf:
        yield best if left is None else int(left[best]), float(score)
        scores[best] = -math.inf


def _steps(row: Row, noise: Noise | None, cut_offs: CutOffs | None, count: int) -> Iterator[float]:
    """Yield falling score thresholds, the last −∞.

    The first is one that `count` tokens reach which top-k and min-p leave, if there are so many. With `count` 1, the
    likeliest token, which top-p leaves too, reaches the last one above −∞.
    """
    left = cut_offs.left if cut_offs else None
    if noise is None:
        yield _last(row.of(row.head(count)), count)
    elif left is None or left.size > max(FEW, noise.few):
        likely = row.largest + noise.one(row.best)
        likely -= _slack(likely)
        if count > 1:
            yield _first(row, noise, cut_offs, count)
        else:
            value = row.value(noise.lead)
            if value >= (cut_offs.threshold if cut_offs else value):
                yield max(likely, value + noise.largest - _slack(value))
            yield likely
    yield -math.inf


def _first(row: Row, noise: Noise, cut_offs: CutOffs | None, count: int) -> float:
    """Return a score that `count` of the likeliest or of the noisiest tokens reach; −∞ if they are too few."""
    found = -math.inf
    for tokens in (row.head(count), noise.leaders(count)):
        values = row.of(tokens)
        scores = values + noise.of(tokens)
        found = max(found, _last(scores[values >= cut_offs.threshold] if cut_offs else scores, count))
    return found


def _last(scores: Logits, count: int) -> float:
    """Return the `count`-th best score; −∞ if there are fewer."""
    return float(np.partition(scores, -count)[-count]) if scores.size >= count else -math.inf


def _slack(score: float) -> float:
    """Return a bound on the rounding error of a score and of what it is compared with."""
    return _ROUNDED * (abs(score) + 64)
