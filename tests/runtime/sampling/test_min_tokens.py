"""A least length: no token that ends a text before it, whatever is drafted and whatever else constrains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from constraints import OneOf
from device_requests import Made, prompt_of, request_of, run
from host_device import HostDevice
from small_grammars import END, grammar, ids
from tiny_models import CHUNK, executor
from tiny_models import VOCAB as TOKENS

from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.decoding.host_loop import HostLoop
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.constraint import Foreseeing, pack, unpack
from specbuild.runtime.sampling.min_tokens import MinTokens

VOCAB = 70
ENDS = list(range(64))
TEXTS = tuple(tuple(64 + token % 32 for token in prompt_of(seed, 9)) for seed in range(20))


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
    """A letter that is in the text before and after; whatever is drafted the same token ends it."""
    fields: dict[str, Any] = {"temperature": 0.9, "seed": 3}
    (free,) = engine.generate("def main(", SamplingParams(40, **fields))
    grown = [engine.decode(free.token_ids[:count]) for count in range(41)]
    letter = next(each for each in grown[10] if each.isalpha() and each in grown[40][len(grown[10]) :])
    least = next(count for count in range(11, 41) if letter in grown[count][len(grown[10]) :])
    for speculation in ("off", "chain:4", "best:8"):
        params = SamplingParams(40, **fields, stop=[letter], min_tokens=10, speculation=speculation)
        for stopped in engine.generate(["def main("] * 4, params):
            assert stopped.token_ids == free.token_ids[:least]
            assert stopped.text == grown[least][: grown[least].index(letter, len(grown[10]))]
            assert (stopped.finish_reason, letter in stopped.text) == ("stop", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def on_device(tree: str, temperature: float, least: int = 6) -> list[Sequence]:
    """Sequences of which two tokens of three end the text, one with another constraint beside."""
    found = []
    for index in range(5):
        inner = OneOf(TEXTS, TOKENS - 1) if index == 1 else None
        constraint = MinTokens(least, [*ENDS, TOKENS - 1], inner) if least else inner
        fields = {"speculation": tree, "temperature": temperature, "seed": index, "max_new_tokens": 18}
        found.append(request_of(prompt_of(index, 4 + 3 * index), constraint=constraint, stop_token_ids=ENDS, **fields))
    return found


@pytest.mark.parametrize(("temperature", "ahead"), [(0.0, 0), (1.0, 32)])
def test_on_a_device_texts_are_long_enough_and_plain_decodings(
    host: KernelLibrary, folder: Path, temperature: float, ahead: int
) -> None:
    """Four slots, each sequence with another tree; rounds that follow each other without the host, too."""
    eos = frozenset({TOKENS - 1})
    alone = executor("target", HostDevice(), folder, 1)
    expected = run(HostLoop(alone, None, CHUNK, eos), on_device("off", temperature))
    for tree in ("chain:4", "best:7"):
        made = Made(host, folder, 4, eos=eos, rounds=ahead)
        done = run(made.loop, on_device(tree, temperature))
        assert [(s.error, s.output) for s in done] == [(None, s.output) for s in expected]
    for sequence in expected:
        assert len(sequence.output) > 6
        assert not {*sequence.output[:6]} & {*ENDS, TOKENS - 1}
    assert tuple(expected[1].output[:9]) in TEXTS
    assert any(s.stop_reason in ENDS for s in expected)
    short = run(Made(host, folder, 4, eos=eos, rounds=ahead).loop, on_device("chain:4", temperature, 0))
    assert min(len(sequence.output) for sequence in short) < 6


def test_what_follows_ends_before_a_token_that_may_not_come_yet() -> None:
    inner = grammar(regex="abcd")
    matcher = MinTokens(2, [END], inner).matcher(12)
    assert isinstance(matcher, Foreseeing)
    assert matcher.follow((), (), 9) == ids("ab cd")
    assert matcher.follow(ids("ab"), ids("cd"), 9) == ids("cd")
    assert matcher.follow(ids("ab cd"), (), 9) == [END]
    late = MinTokens(3, [END, *ids("cd")], inner).matcher(12)
    assert isinstance(late, Foreseeing)
    assert late.follow((), (), 9) == ids("ab")
    assert late.follow(ids("ab cd"), (), 9) == []
    assert not isinstance(MinTokens(4, [END], Even()).matcher(VOCAB), Foreseeing)
