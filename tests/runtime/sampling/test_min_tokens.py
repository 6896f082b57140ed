"""A least length: no token that ends a text before it, whatever is drafted and whatever else constrains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.sampling.constraint import pack, unpack
from specbuild.runtime.sampling.min_tokens import MinTokens

VOCAB = 70


class Even:
    """Allows even tokens alone."""

    def matcher(self, vocab_size: int) -> Even:
        return self

    def mask(self, path: object) -> np.ndarray:
        return pack(range(0, VOCAB, 2), VOCAB)

    def emit(self, token: int) -> None:
        assert token % 2 == 0


def test_ends_are_illegal_until_there_are_enough() -> None:
    matcher = MinTokens(3, [4, 65, 9999]).matcher(VOCAB)
    for path in ([], [1], [1, 2]):
        mask = matcher.mask(path)
        assert mask is not None
        assert np.flatnonzero(~unpack(mask, VOCAB)).tolist() == [4, 65]
    assert matcher.mask([1, 2, 3]) is None
    matcher.emit(1)
    matcher.emit(2)
    assert matcher.mask([]) is not None
    assert matcher.mask([3]) is None
    matcher.emit(3)
    assert matcher.mask([]) is None


def test_another_constraint_holds_beside_it_and_after_it() -> None:
    matcher = MinTokens(1, [4], Even()).matcher(VOCAB)
    first, second = matcher.mask([]), matcher.mask([2])
    assert first is not None
    assert second is not None
    assert np.flatnonzero(unpack(first, VOCAB)).tolist() == [0, 2, *range(6, VOCAB, 2)]
    assert np.flatnonzero(unpack(second, VOCAB)).tolist() == list(range(0, VOCAB, 2))
    matcher.emit(2)


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with Engine.load(bundle, batch_size=4) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_are_long_enough_and_the_same_with_every_tree(engine: Engine, temperature: float) -> None:
    """Nearly every token ends the text here, so that without it nearly none is longer than a token."""
    (free,) = engine.generate("import os\n", SamplingParams(24, temperature=temperature, seed=1))
    ends = list(dict.fromkeys(free.token_ids))[:20]
    found = []
    for speculation in ("off", "auto", "chain:4", "best:8"):
        params = SamplingParams(
            24, temperature=temperature, seed=1, stop_token_ids=ends, min_tokens=6, speculation=speculation
        )
        found += engine.generate(["import os\n"] * 4, params)
    assert len({tuple(result.token_ids) for result in found}) == 1
    assert not set(found[0].token_ids[:6]) & set(ends)
    (short,) = engine.generate("import os\n", SamplingParams(24, temperature=temperature, seed=1, stop_token_ids=ends))
    assert len(short.token_ids) == 1


def test_the_models_own_end_counts_unless_it_is_ignored(engine: Engine) -> None:
    eos = engine.manifest.eos_token_ids[0]
    eager = SamplingParams(8, logit_bias={eos: 1e6}, min_tokens=5)
    (result,) = engine.generate("x", eager)
    assert (len(result.token_ids), result.token_ids[-1], result.finish_reason) == (6, eos, "stop")
    (ignored,) = engine.generate("x", SamplingParams(8, logit_bias={eos: 1e6}, min_tokens=5, ignore_eos=True))
    assert ignored.token_ids == [eos] * 8


def test_stop_strings_count_from_then_on(engine: Engine) -> None:
    (free,) = engine.generate("def main(", SamplingParams(40))
    letter = next(character for character in free.text if character.isalpha())
    (stopped,) = engine.generate("def main(", SamplingParams(40, stop=[letter], min_tokens=10))
    assert 10 < len(stopped.token_ids) <= 40
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert letter in stopped.text
