"""How far a model moved: known shifts, real decoding, and chains that are really drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from small_models import random_model, random_texts

from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.reference import Reference, greedy, text_logits
from specbuild.builder.quantize.linears import Names, no_grad, rows, simulated
from specbuild.builder.quantize.numbers import Quantized, fit, quantize
from specbuild.builder.quantize.quality import DEPTH, Before, acceptance, moved

TEXTS = random_texts(3, 20)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("llama")


@pytest.fixture(scope="module")
def before(model: Any) -> Before:
    return Before.of(model, TEXTS, [0], 64)


def rounded(model: Any, scheme: Scheme) -> dict[str, Quantized]:
    weights = {name: rows(model.get_submodule(name)) for name in Names.of(model).weights}
    return {n: quantize({n: each}, fit(scheme, each.shape[1]))[n] for n, each in weights.items()}


def test_the_same_has_not_moved(model: Any, before: Before) -> None:
    """Nor has what a softmax does not see: the perplexity is that of transformers' own loss."""
    found = moved(before, lambda text: text_logits(model, text) + np.arange(len(text), dtype=np.float32)[:, None])
    assert found["tokens"] == sum(map(len, TEXTS))
    assert found["kl_nats_per_token"] == pytest.approx(0, abs=1e-9)
    assert found["logit_cosine"] == pytest.approx(1)
    assert found["top1_agreement"] == 1
    assert found["first_divergence"] == [None] * 3
    losses = []
    with torch.no_grad():
        for text in TEXTS:
            ids = torch.tensor([text])
            losses += [float(model(input_ids=ids, labels=ids).loss)] * (len(text) - 1)
    assert found["perplexity"] == [pytest.approx(np.exp(np.mean(losses)), rel=1e-5)] * 2


def test_a_known_shift_has_known_numbers() -> None:
    """Two tokens, of log-odds 0 before and a after: all in closed form."""
    texts = [[0, 1, 1, 0], [1, 0]]
    logits = [np.zeros((len(text), 2), dtype=np.float32) for text in texts]
    odds = {4: [0.0, 1.0, 2.0, 3.0], 2: [-1.0, 5.0]}
    before = Before(texts, logits, [Reference([0], [1, 0])])
    found = moved(before, lambda text: np.array([[0.0, each] for each in odds[len(text)]], dtype=np.float32))
    each = np.array([*odds[4], *odds[2]])
    p = 1 / (1 + np.exp(-each))  # of token 1
    divergence = -0.5 * np.log(4 * p * (1 - p))
    assert found["tokens"] == 6
    assert found["kl_nats_per_token"] == pytest.approx(divergence.mean())
    assert found["kl_largest"] == pytest.approx(divergence.max())
    assert found["kl_standard_error"] == pytest.approx(divergence.std() / 6**0.5)
    assert found["top1_agreement"] == pytest.approx(2 / 6)  # the first of equals: the token 0 where the odds are ≤ 0
    nexts = [(0.0, 1), (1.0, 1), (2.0, 0), (-1.0, 0)]
    surprise = [np.log(1 + np.exp(-a if token else a)) for a, token in nexts]
    assert found["perplexity"] == [pytest.approx(2.0), pytest.approx(np.exp(np.mean(surprise)))]
    assert found["first_divergence"] == [0]


def test_first_divergence_is_that_of_decoding(model: Any, before: Before) -> None:
    parted = []
    with simulated(model, rounded(model, Scheme("int4", "fp32", 32))):
        found = moved(before, lambda text: text_logits(model, text))
        for reference in before.greedy:
            tokens = list(reference.prompt)
            for _ in reference.tokens:  # really written, token by token
                tokens.append(int(text_logits(model, tokens)[-1].argmax()))
            pairs = zip(tokens[len(reference.prompt) :], reference.tokens, strict=True)
            parted.append(next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None))
    assert found["first_divergence"] == parted
    assert parted != [None] * 3


@pytest.mark.parametrize("positions", [2, 9, 64])
def test_models_of_few_positions(model: Any, positions: int) -> None:
    (reference,) = Before.of(model, [list(range(1, 1 + positions))], [], positions).greedy
    assert len(reference.text) < positions
    assert reference.prompt
    assert reference.tokens
    nothing_follows = Before.of(model, [[5]], [0], positions)
    assert moved(nothing_follows, lambda text: text_logits(model, text))["perplexity"] == [None, None]


@pytest.mark.parametrize(("vocabulary", "texts"), [(1_700_000, TEXTS[:2]), (1 << 23, [TEXTS[0][:8]])])
def test_few_texts_of_a_large_vocabulary(vocabulary: int, texts: list[list[int]]) -> None:
    model = random_model("llama", num_hidden_layers=1)
    model.config.vocab_size = vocabulary
    found = Before.of(model, TEXTS, [0], 64)
    assert (found.texts, [len(each) for each in found.logits]) == (texts, [len(text) for text in texts])


def decoded(draft: Any, references: Sequence[Reference]) -> float:
    """Tokens a round of chains really drafted, as the target's text says what it would have written."""
    tokens = rounds = 0
    for reference in references:
        written = [*reference.prompt, reference.tokens[0]]
        text = [*reference.prompt, *reference.tokens]
        while len(written) < len(text):
            chain: list[int] = []
            for _ in range(min(DEPTH, len(text) - len(written))):
                chain.append(int(text_logits(draft, written + chain)[-1].argmax()))
            accepted = 0
            while accepted < len(chain) and chain[accepted] == text[len(written) + accepted]:
                accepted += 1
            rounds, tokens = rounds + 1, tokens + accepted + 1
            written += text[len(written) : len(written) + accepted + 1]
    return tokens / rounds


@pytest.mark.slow
def test_acceptance_is_that_of_chains_really_drafted(model: Any) -> None:
    references = greedy(model, TEXTS, 24, [])
    found = rounded(model, Scheme("int4", "fp32", 32))
    before, after = acceptance(model, found, references)
    with no_grad(model):
        assert before == pytest.approx(decoded(model, references))
        with simulated(model, found):
            assert after == pytest.approx(decoded(model, references))
    assert 1 < after < before
    whole = greedy(model, TEXTS[:1], 1 + 4 * (DEPTH + 1), [])
    assert acceptance(model, {}, whole) == [DEPTH + 1, DEPTH + 1]
    assert acceptance(model, {}, [Reference([5, 6], [7])]) == [0, 0], "a text that ends at once has no round"
