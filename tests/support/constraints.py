"""A constraint that is easily enumerated: a text is one of some sequences of tokens, and then ends. Loops for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.drafting.proposer import Proposer
from specbuild.runtime.sampling.constraint import pack

BATCH = 4
QUANTILE = 3.0902  # of the normal distribution, 0.999


@dataclass(frozen=True)
class OneOf:
    """`texts`: token ids; `end`: the token after each of them, which stays legal for ever."""

    texts: tuple[tuple[int, ...], ...]
    end: int

    def matcher(self, vocab_size):
        return Place(self, vocab_size)

    def legal(self, text):
        """The tokens after a text that has kept to it."""
        begun = tuple(text)
        after = {each[len(begun)] for each in self.texts if each[: len(begun)] == begun and len(each) > len(begun)}
        return after | ({self.end} if begun in self.texts or self.end in begun or not after else set())


class Place:
    """See `Matcher`; every path that it is asked about is legal, which it checks."""

    def __init__(self, of, vocab_size):
        self._of, self._vocab_size, self.text, self.asked = of, vocab_size, list[int](), 0

    def mask(self, path):
        self.asked += 1
        text = list(self.text)
        for token in path:
            assert token in self._of.legal(text), f"{token} is not legal after {text}"
            text.append(token)
        return pack(self._of.legal(text), self._vocab_size)

    def emit(self, token):
        assert token in self._of.legal(self.text), f"{token} was emitted after {self.text}"
        self.text.append(token)


def family(seed, vocab_size, end, count=40, length=12):
    """Sequences of different lengths with common beginnings."""
    rng = np.random.default_rng(seed)
    texts = [tuple(rng.integers(0, vocab_size, int(rng.integers(1, length))).tolist())]
    while len(texts) < count:
        base = texts[int(rng.integers(len(texts)))]
        kept = base[: int(rng.integers(0, len(base) + 1))]
        more = rng.integers(0, vocab_size, int(rng.integers(1, length))).tolist()
        texts.append((*kept, *more)[: 2 * length])
    return OneOf(tuple(text for text in texts if end not in text), end)


def probabilities(model, prompt, constraint, params):
    """The chance of every text, its end included: the product of softmaxes over what is legal, by enumeration."""

    def grown(text, chance):
        if text and text[-1] == constraint.end:
            yield text, chance
            return
        legal = sorted(constraint.legal(text))
        scores = model([*prompt, *text])[legal].astype(np.float64) / params.temperature
        weights = np.exp(scores - scores.max())
        for token, share in zip(legal, (weights / weights.sum()).tolist(), strict=True):
            yield from grown((*text, token), chance * share)

    return dict(grown((), 1.0))


def fits(seen, expected):
    """Assert by χ² that texts were drawn with these chances, at the 0.999 quantile; returns how many classes it had.

    Texts of which fewer than five are expected are counted together (Wilson and Hilferty, 1931, have the quantile).
    """
    draws = sum(seen.values())
    assert seen.keys() <= expected.keys()
    rare = {text for text, chance in expected.items() if chance * draws < 5}
    counts = [(seen[text], expected[text] * draws) for text in expected.keys() - rare]
    if rare:
        counts.append((sum(seen[text] for text in rare), max(sum(expected[text] for text in rare) * draws, 1e-9)))
    degrees = len(counts) - 1
    critical = degrees * (1 - 2 / (9 * degrees) + QUANTILE * (2 / (9 * degrees)) ** 0.5) ** 3
    assert sum((got - wanted) ** 2 / wanted for got, wanted in counts) < critical
    return len(counts)


def loop_of(hash_model, hash_executor, seed, drafter, end=11):
    """A loop over hash models in batches of four. `drafter`: lookup, model or both."""
    executor = hash_executor(hash_model(seed, error=0.4), BATCH)
    drafts = None if drafter == "lookup" else ModelDrafter(executor, 8)
    target = hash_executor(hash_model(seed), BATCH)
    return HostLoop(target, Proposer(drafts, looks_up=drafter != "model"), 16, frozenset({end}))
