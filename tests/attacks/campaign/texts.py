"""Attacks on texts: ids of any tokenizer are one text, cut anywhere, stopped or not, with speculation or without."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from text_tokenizers import KINDS, SAID, SIZE

from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.requests.detokenizer import Detokenizer
from specbuild.runtime.requests.tokenizer import Tokenizer

from .attack import Attack, Bench
from .bundle_copy import copied, manifest, put
from .mutations import to_bytes
from .outcome import Fault, check_error
from .parameters import TREES
from .tokenizer import decoder

CHOICES = ("\n🦊", "猫🦊", "🦊\n", "<think>", "a<|x|>b", "<|end|>", "não<|late|>")  # 🦊 is no token's
SPOKEN = ("byte_level", "added", "byte_fallback", "prefix_space", "unigram_bytes")  # whose tokens can write any text


class TextsAttack(Attack):
    """Holds texts against each other: those of one tokenizer's ids, or those of an engine that has such a tokenizer."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self.vocab = manifest(bench.bundle)["models"]["target"]["vocab_size"]

    def attempt(self, rng: random.Random, place: Path) -> None:
        kind = rng.choice(sorted(KINDS))
        if rng.random() < 0.2:
            self._decode(rng, kind, place)
        else:
            _cut(rng, kind, place)

    def _decode(self, rng: random.Random, kind: str, place: Path) -> None:
        """An engine's texts: with speculation and without, in pieces and whole."""
        root = copied(self.bench.bundle, place)
        put(root, manifest(root)["tokenizer"], KINDS[kind](self.vocab).to_str().encode(), hashed=True)
        how: dict[str, Any] = {"temperature": rng.choice((0.0, 0.8)), "skip_special_tokens": rng.random() < 0.5}
        how |= {"seed": rng.randrange(2**64), "stop": _stop(rng, SAID), "ignore_eos": rng.random() < 0.5}
        if kind in SPOKEN and rng.random() < 0.5:
            how |= {"structured_outputs": {"choice": [rng.choice(CHOICES)]}, "max_new_tokens": 3}
        else:
            how |= {"max_new_tokens": rng.choice((1, 8, 20)), "min_tokens": rng.choice((0, 0, 1))}
        prompts = [[token % self.vocab for token in _ids(rng, self.vocab)] or [2] for _ in range(3)]
        tree = rng.choice(TREES)
        (place / "request.txt").write_text(repr((kind, how, tree, prompts)))
        with Engine.load(root, batch_size=2) as engine:
            expected = _texts(engine, prompts, SamplingParams(**how, speculation="off"))
            found = _texts(engine, prompts, SamplingParams(**how, speculation=tree))
        if len({*expected, *found}) != 1:
            raise Fault("wrong", f"{kind} with {tree} gave {found}, plain decoding {expected}")


def _texts(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[tuple[str, ...]]:
    """The texts of results, and of their chunks put together."""
    streamed = [""] * len(prompts)
    for chunk in engine.stream(prompts, params):
        streamed[chunk.index] += chunk.text
    results = engine.generate(prompts, params)
    for result in results:
        check_error(result.error)
    return [tuple(result.text for result in results), tuple(streamed)]


def _cut(rng: random.Random, kind: str, place: Path) -> None:
    """The text of some ids, read at some places."""
    body = json.loads(KINDS[kind]().to_str())
    if rng.random() < 0.2:
        body["decoder"] = decoder(rng)
    tokenizer = Tokenizer(to_bytes(body), None, {})
    ids, prompt, skips = _ids(rng, SIZE), _ids(rng, SIZE)[:4], rng.random() < 0.5
    whole = _read(Detokenizer(tokenizer, prompt, (), 0, skips), ids, set())
    places = {rng.randrange(len(ids) + 1) for _ in range(6)}
    for stop, least in (((), 0), (_stop(rng, whole[0]), rng.choice((0, 0, 5)))):
        (place / "ids.txt").write_text(repr((kind, body["decoder"], ids, prompt, skips, stop, least, places)))
        made = [Detokenizer(tokenizer, prompt, stop, least, skips) for _ in range(2)]
        expected, found = _read(made[0], ids, set()), _read(made[1], ids, places)
        if found != expected or not whole[0].startswith(expected[0]):
            raise Fault("wrong", f"{kind} gave {found!r} in pieces, {expected!r} at once, {whole!r} unstopped")


def _read(detokenizer: Detokenizer, ids: list[int], places: set[int]) -> tuple[str, str | None, int]:
    """The text as it is read after so many tokens, what stopped it, and after how many."""
    text, count = "", 0
    for count, token in enumerate(ids, 1):
        if detokenizer.push(token):
            break
        if count in places:
            text += detokenizer.text[len(text) :]
    detokenizer.finish()
    return text + detokenizer.text[len(text) :], detokenizer.stop_reason, count


def _ids(rng: random.Random, size: int) -> list[int]:
    """Token ids, most of them parts of characters, some special, some that no token has."""
    ranges = ((0, 2), (2, 300), (2, 300), (2, 300), (0, size), (0, size + 9))
    return [rng.randrange(*rng.choice(ranges)) for _ in range(rng.choice((0, 1, 5, 40)))]


def _stop(rng: random.Random, text: str) -> tuple[str, ...]:
    """Stop strings of which a text has most."""
    starts = [rng.randrange(len(text) + 1) for _ in range(rng.choice((0, 1, 3)))]
    return tuple(text[start : start + rng.choice((1, 2, 5))] or "\ufffd" for start in starts)
