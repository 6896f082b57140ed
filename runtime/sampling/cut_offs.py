"""Top-k, top-p and min-p: which tokens of a node may be chosen at all."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class CutOffs:
    """Top-k, then top-p, then min-p over one node's logits, each on what the one before left.

    Top-k and min-p are one threshold. Top-p is asked token by token, which needs no sort: the mass above a token is
    summed when the walk comes to it, and the walk comes to few. Tokens of equal logits stay or go together.
    """

    def __init__(self, logits: Logits, top_k: int, top_p: float, min_p: float) -> None:
        self._logits, self._top_k, self._top_p = logits, top_k, top_p
        self._floor = float(logits.max()) + math.log(min_p) if min_p > 0 else -math.inf
        self._kth = self._next = -math.inf  # the k-th largest logit, and the largest one that top-k leaves out
        if 0 < top_k < logits.size:
            ranked = np.partition(logits, (-top_k - 1, -top_k))
            self._next, self._kth = float(ranked[-top_k - 1]), float(ranked[-top_k])
        if self._top_p < 1:
            self._weights = np.exp(logits - logits.max())
            self._total = float(self._weights[logits >= self._kth].sum(dtype=np.float64))

    def mask(self, scores: Logits) -> Logits:
        """The scores, −inf where top-k or min-p leave a token out."""
        threshold = max(self._kth, self._floor)
        return scores if threshold == -math.inf else np.where(self._logits >= threshold, scores, np.float32(-np.inf))

    def in_top_p(self, token: int) -> bool:
        """Whether top-p leaves a token in that top-k did."""
        return self._top_p >= 1 or self._mass_above(float(self._logits[token])) < self._top_p

    def drop_up_to(self, token: int, scores: Logits) -> None:
        """Set to −inf the scores of a token that top-p leaves out and of all that are no likelier, so left out too."""
        scores[self._logits <= self._logits[token]] = -np.inf

    def surely(self, token: int, moved: float) -> bool | None:
        """Whether a token is left in, wherever each two logits lie up to `moved` farther apart; None: it depends."""
        if self._leaves(token, moved):
            return True
        return None if self._leaves(token, -moved) else False

    def _leaves(self, token: int, moved: float) -> bool:
        """Whether every cut-off leaves a token in whose rivals all gain as much on it, or with `moved` < 0 all lose."""
        value = float(self._logits[token]) - moved
        above = self._logits > value
        above[token] = False
        if value < self._floor or (self._kth > -math.inf and np.count_nonzero(above) >= self._top_k):
            return False
        if self._top_p >= 1:
            return True
        mass = float(self._weights[above].sum(dtype=np.float64)) * math.exp(min(moved, 700.0))
        return mass < self._top_p * (mass + self._total - float(self._weights[above].sum(dtype=np.float64)))

    def slacks(self, token: int) -> list[float]:
        """Per cut-off that is on, how far inside it a token is, in logits, for top-p in mass; negative outside."""
        value, slacks = float(self._logits[token]), []
        if self._kth > -math.inf:
            slacks.append(value - (self._next if value >= self._kth else self._kth))
        if self._top_p < 1:
            slacks.append(self._top_p_slack(value))
        if self._floor > -math.inf:
            slacks.append(value - self._floor)
        return slacks

    def _top_p_slack(self, value: float) -> float:
        """The less of two moves: of the mass above across top-p, or of the token across its neighbour at the cut."""
        ranked = np.sort(self._logits[self._logits >= self._kth])[::-1]
        weights = np.exp((ranked - ranked[0]).astype(np.float64))
        before = (np.cumsum(weights) - weights)[np.searchsorted(-ranked, -ranked)]  # equals share what is above them
        lowest = float(ranked[before < self._top_p * weights.sum()][-1])
        out, mass = ranked[ranked < lowest], self._top_p - self._mass_above(value)
        if value >= lowest:
            return min(mass, value - float(out[0])) if out.size else math.inf
        return max(mass, value - lowest)

    def _mass_above(self, value: float) -> float:
        return float(self._weights[self._logits > value].sum(dtype=np.float64)) / self._total
