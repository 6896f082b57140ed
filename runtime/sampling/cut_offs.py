"""The cut-offs top-k, top-p and min-p: which tokens of a node may be chosen at all."""

from __future__ import annotations

import math

import numpy as np

from .row import Logits, Row, Tokens


class CutOffs:
    """Top-k, then top-p, then min-p over one node's logits, each applied to what the one before left.

    Top-k and min-p are one threshold. Top-p is tested token by token, without a sort: the probability mass above a
    token is summed only when it is tested, and few tokens are. Tokens of equal logits stay or go together.

    Attributes:
        left: The tokens that top-k and min-p leave, ascending; None: all.
        cuts_mass: Whether top-p is on.
    """

    def __init__(self, row: Row, top_k: int, top_p: float, min_p: float) -> None:
        self._row, self._top_k, self._top_p = row, top_k, top_p
        self.cuts_mass = top_p < 1
        self._floor = row.largest + math.log(min_p) if min_p > 0 else -math.inf
        self._kth = -math.inf  # the k-th largest logit; −∞: top-k cuts nothing
        self._among: Tokens | None = None  # the tokens that top-k leaves; None: all
        if 0 < top_k < row.raw.size:
            self._among = row.head(top_k)
            values = row.of(self._among)
            if values.size >= top_k:  # else fewer than k are finite
                self._kth = float(np.partition(values, -top_k)[-top_k])
                self._among = self._among[values >= self._kth]
        self.left = self._among
        if self._floor > self._kth:
            likely = row.reaching(self._floor).nonzero()[0] if self.left is None else self.left
            self.left = likely[row.of(likely) >= self._floor]
        if top_p < 1:
            self._values = row.all() if self._among is None else row.of(self._among)
            self._weights = self._weigh(self._values)
            self._total = float(self._weights.sum(dtype=np.float64))

    def narrow(self, few: int) -> None:
        """Apply top-p to `left`, if all tokens that top-p leaves are among the `few` likeliest; else do nothing."""
        if self._top_p >= 1 or self.left is not None or self._top_p * self._total > few:
            return  # `few` tokens cannot hold that mass: no weight is above 1
        likely = self._row.head(few)
        values = self._row.of(likely)
        ranked = np.argsort(-values)
        weights = self._weights[likely[ranked]].astype(np.float64)
        inside = np.cumsum(weights) - weights < self._top_p * self._total * (1 + 1e-6)
        if not inside[-1]:
            self.left = likely[values >= values[ranked[np.count_nonzero(inside) - 1]]]

    def in_top_p(self, value: float) -> bool:
        """Return whether top-p leaves tokens with this logit, given that top-k does."""
        return self._top_p >= 1 or self._mass_above(value) < self._top_p

    def slacks(self, token: int) -> list[float]:
        """Return how far inside each active cut-off a token is, negative if outside; in logits, top-p in mass."""
        value, slacks = self._row.value(token), []
        if self._kth > -math.inf:
            slacks.append(value - (self._next if value >= self._kth else self._kth))
        if self._top_p < 1:
            slacks.append(self._top_p_slack(value))
        if self._floor > -math.inf:
            slacks.append(value - self._floor)
        return slacks

    @property
    def _next(self) -> float:
        """The (k + 1)-th largest logit: the largest that top-k leaves out, unless it ties with the k-th."""
        return float(np.partition(self._row.all(), -self._top_k - 1)[-self._top_k - 1])

    def _top_p_slack(self, value: float) -> float:
        """Return the smaller distance to the cut: of the mass above to top-p, or of the logit to its neighbour."""
        ranked = np.sort(self._values)[::-1]
        weights = np.exp((ranked - ranked[0]).astype(np.float64))
        before = (np.cumsum(weights) - weights)[np.searchsorted(-ranked, -ranked)]  # alike for equals
        lowest = float(ranked[before < self._top_p * weights.sum()][-1])
        out, mass = ranked[ranked < lowest], self._top_p - self._mass_above(value)
        if value >= lowest:
            return min(mass, value - float(out[0])) if out.size else math.inf
        return max(mass, value - lowest)

    def _weigh(self, values: Logits) -> Logits:
        """Return probabilities relative to the likeliest token's."""
        weights: Logits = np.exp(values - np.float32(self._row.largest))
        return weights

    def _mass_above(self, value: float) -> float:
        return float(self._weights[(self._values > value).nonzero()[0]].sum(dtype=np.float64)) / self._total
