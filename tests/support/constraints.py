"""A constraint that is easily enumerated: a text is one of some sequences of tokens, and then ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.sampling.constraint import Bitmask, pack
from specbuild.runtime.sampling.sampler import SamplingParams


@dataclass(frozen=True)
class OneOf:
    """`texts`: token ids; `end`: the token after each of them, which stays legal for ever."""

    texts: tuple[tuple[int, ...], ...]
    end: int

    def matcher(self, vocab_size: int) -> Place:
        return Place(self, vocab_size)

    def legal(self, text: Sequence[int]) -> set[int]:
        """The tokens after a text that has kept to it."""
        begun = tuple(text)
        after = {each[len(begun)] for each in self.texts if each[: len(begun)] == begun and len(each) > len(begun)}
        return after | ({self.end} if begun in self.texts or self.end in begun or not after else set())


class Place:
    """See `Matcher`; every path that it is asked about is legal, which it checks."""

    def __init__(self, of: OneOf, vocab_size: int) -> None:
        self._of, self._vocab_size, self.text, self.asked = of, vocab_size, list[int](), 0

    def mask(self, path: Sequence[int]) -> Bitmask:
        self.asked += 1
        text = list(self.text)
        for token in path:
            assert token in self._of.legal(text), f"{token} is not legal after {text}"
            text.append(token)
        return pack(self._of.legal(text), self._vocab_size)

    def emit(self, token: int) -> None:
        assert token in self._of.legal(self.text), f"{token} was emitted after {self.text}"
        self.text.append(token)


def family(seed: int, vocab_size: int, end: int, count: int = 40, length: int = 12) -> OneOf:
    """Sequences of different lengths with common beginnings."""
    rng = np.random.default_rng(seed)
    texts = [tuple(rng.integers(0, vocab_size, int(rng.integers(1, length))).tolist())]
    while len(texts) < count:
        base = texts[int(rng.integers(len(texts)))]
        kept = base[: int(rng.integers(0, len(base) + 1))]
        more = rng.integers(0, vocab_size, int(rng.integers(1, length))).tolist()
        texts.append((*kept, *more)[: 2 * length])
    return OneOf(tuple(text for text in texts if end not in text), end)


def probabilities(
    model: Any, prompt: list[int], constraint: OneOf, params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """The chance of every text, its end included: the product of softmaxes over what is legal, by enumeration."""

    def grown(text: tuple[int, ...], chance: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if text and text[-1] == constraint.end:
            yield text, chance
            return
        legal = sorted(constraint.legal(text))
        scores: NDArray[np.float64] = model([*prompt, *text])[legal].astype(np.float64) / params.temperature
        weights = np.exp(scores - scores.max())
        for token, share in zip(legal, (weights / weights.sum()).tolist(), strict=True):
            yield from grown((*text, token), chance * share)

    return dict(grown((), 1.0))
