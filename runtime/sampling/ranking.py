"""The ranking of a node's tokens by their scores, of which no more is computed than is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from .cut_offs import CutOffs
from .noise import Noise
from .row import Logits, Row, Tokens

SMALL = 8192  # vocabulary whose noise is computed once a position: a few comparisons a node would cost more
FEW = 512  # tokens that are ranked at once
DENSE = 8  # of so many tokens one: fewer are cheaper to gather than all to compare
_ROUNDED = 2.0**-20  # of a score: more than its sum and its noise are rounded by


def contenders(row: Row, noise: Noise | None, least: float, left: Tokens | None = None) -> tuple[Tokens, Logits]:
    """All tokens whose score, processed logit plus noise, is at least so much, ascending, and their scores `float32`.

    Of all tokens, or of those `left`. Nobody reaches it whose logit does not with the largest noise, nor whose noise
    does not with the largest logit: both are comparisons, and few tokens are left for the logarithms.
    """
    tokens = left
    if noise is None:
        tokens = row.reaching(least).nonzero()[0] if tokens is None else tokens
        scores = row.of(tokens)
    else:
        if tokens is None or tokens.size > max(FEW, noise.few):
            slack = _slack(least)
            loud = least - row.most - slack
            if tokens is None:
                likely = row.reaching(least - noise.most - slack)
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
    """Tokens and scores, best first, the lowest id among equals; none that a cut-off excludes, or without a score.

    misses: ends after so many excluded by top-p. count: tokens that are looked for; more are found too, more slowly.
    """
    found = _ranked(row, noise, cut_offs, count + (misses or 0))
    if cut_offs is None or not cut_offs.cuts_mass:
        yield from found
        return
    out = -math.inf  # a logit that top-p leaves out, so all that are less as well
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
    """As `ranking`, before top-p."""
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
    """As `_ranked`, from every token's score."""
    if left is not None:
        scores = row.of(left) if noise is None else row.of(left) + noise.all()[left]
    else:
        scores = row.all().copy() if noise is None else row.all() + noise.all()
    while scores.size and (score := scores[best := int(scores.argmax())]) > -math.inf:
        yield best if left is None else int(left[best]), float(score)
        scores[best] = -math.inf


def _steps(row: Row, noise: Noise | None, cut_offs: CutOffs | None, count: int) -> Iterator[float]:
    """Falling scores, the last −∞; `count` tokens that top-k and min-p leave reach the first, if so many are left.

    One that top-p leaves too reaches the last but one: the likeliest.
    """
    left = cut_offs.left if cut_offs else None
    if noise is None:
        yield _last(row.of(row.head(count)), count)
    elif left is None or left.size > max(FEW, noise.few):
        likely = row.most + noise.one(row.best)
        likely -= _slack(likely)
        if count > 1:
            yield _first(row, noise, cut_offs, count)
        else:
            value = row.value(noise.lead)
            if value >= (cut_offs.threshold if cut_offs else value):
                yield max(likely, value + noise.most - _slack(value))
            yield likely
    yield -math.inf


def _first(row: Row, noise: Noise, cut_offs: CutOffs | None, count: int) -> float:
    """A score that `count` tokens reach, of the likeliest or of those with most noise; −∞ where these are too few."""
    found = -math.inf
    for tokens in (row.head(count), noise.leaders(count)):
        values = row.of(tokens)
        scores = values + noise.of(tokens)
        found = max(found, _last(scores[values >= cut_offs.threshold] if cut_offs else scores, count))
    return found


def _last(scores: Logits, count: int) -> float:
    """The `count`-th best; −∞ where there are fewer."""
    return float(np.partition(scores, -count)[-count]) if scores.size >= count else -math.inf


def _slack(score: float) -> float:
    """More than a score, or what it is compared with, is rounded by."""
    return _ROUNDED * (abs(score) + 64)
