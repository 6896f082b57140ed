"""How far a model moved: known shifts, real decoding, and chains that are really drafted."""

import numpy as np
import pytest
import torch
from small_models import holding, random_model, random_texts, rows

from specbuild.builder.config.scheme import Scheme
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.reference import text_logits
from specbuild.builder.quantize.linears import Names
from specbuild.builder.quantize.numbers import fit, quantize
from specbuild.builder.quantize.quality import Before, acceptance, beginnings, first_divergence, moved

TEXTS = random_texts(3, 20)


@pytest.fixture(scope="module")
def model():
    return random_model("llama")


@pytest.fixture(scope="module")
def before(model):
    return Before.of(LayeredModel.of(model), TEXTS)


def rounded(model, scheme):
    weights = {name: rows(model.get_submodule(name)) for name in Names.of(model).weights}
    return {n: quantize({n: each}, fit(scheme, each.shape[1]))[n] for n, each in weights.items()}


def test_the_same_has_not_moved(model, before):
    """Nor has what a softmax does not see: the perplexity is that of transformers' own loss."""
    shift = [np.arange(len(text), dtype=np.float32)[:, None] for text in TEXTS]
    found = moved(before, [text_logits(model, text) + each for text, each in zip(TEXTS, shift, strict=True)])
    assert found["tokens"] == sum(map(len, TEXTS))
    assert found["kl_nats_per_token"] == pytest.approx(0, abs=1e-9)
    assert found["logit_cosine"] == pytest.approx(1)
    assert found["top1_agreement"] == 1
    losses = []
    with torch.no_grad():
        for text in TEXTS:
            ids = torch.tensor([text])
            losses += [float(model(input_ids=ids, labels=ids).loss)] * (len(text) - 1)
    assert found["perplexity"] == [pytest.approx(np.exp(np.mean(losses)), rel=1e-5)] * 2


def test_a_known_shift_has_known_numbers():
    """Two tokens, of log-odds 0 before and a after: all in closed form."""
    texts = [[0, 1, 1, 0], [1, 0]]
    logits = [np.zeros((len(text), 2), dtype=np.float32) for text in texts]
    odds = {4: [0.0, 1.0, 2.0, 3.0], 2: [-1.0, 5.0]}
    after = [np.array([[0.0, each] for each in odds[len(text)]], dtype=np.float32) for text in texts]
    found = moved(Before(texts, logits), after)
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


def written(model, prompt, count):
    """Tokens really written, one by one."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(text_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_first_divergence_is_that_of_decoding(model, before):
    """Whoever of the two writes."""
    prompts, count = beginnings(before, 64)
    exact = [written(model, prompt, count) for prompt in prompts]
    with holding(model, rounded(model, Scheme("int4", "fp32", 32))):
        narrow = [written(model, prompt, count) for prompt in prompts]
    pairs = [zip(*both, strict=True) for both in zip(exact, narrow, strict=True)]
    parted = [next((at for at, (a, b) in enumerate(each) if a != b), None) for each in pairs]
    assert parted != [None] * 3
    for prompt, tokens, at in zip(prompts, narrow, parted, strict=True):
        assert first_divergence(prompt, tokens, text_logits(model, prompt + tokens[:-1])) == at
    same = text_logits(model, prompts[0] + exact[0][:-1])
    assert first_divergence(prompts[0], exact[0], same) is None


@pytest.mark.parametrize("positions", [2, 9, 64])
def test_models_of_few_positions(model, positions):
    ((prompt,), new) = beginnings(Before([list(range(1, 1 + positions))], []), positions)
    assert prompt
    assert new >= 1
    assert len(prompt) + new <= positions
    nothing_follows = Before.of(LayeredModel.of(model), [[5]])
    assert moved(nothing_follows, [text_logits(model, [5])])["perplexity"] == [None, None]


@pytest.mark.parametrize(("vocabulary", "texts"), [(1_700_000, TEXTS[:2]), (1 << 23, [TEXTS[0][:8]])])
def test_few_texts_of_a_large_vocabulary(vocabulary, texts):
    model = random_model("llama", num_hidden_layers=1)
    model.config.vocab_size = vocabulary
    found = Before.of(LayeredModel.of(model), TEXTS)
    assert (found.texts, [len(each) for each in found.logits]) == (texts, [len(text) for text in texts])


def decoded(draft, target, texts):
    """Tokens a round of chains of the texts, each token of which is drafted and verified by itself."""
    tokens = rounds = 0
    for text in texts:
        at = 0
        while at < len(text):
            accepted = 0
            while accepted < min(4, len(text) - at):
                chosen = [int(text_logits(each, text[: at + accepted + 1])[-1].argmax()) for each in (draft, target)]
                if len(set(chosen)) > 1:
                    break
                accepted += 1
            rounds, tokens, at = rounds + 1, tokens + accepted + 1, at + accepted + 1
    return tokens / rounds


@pytest.mark.slow
def test_acceptance_is_that_of_chains_really_drafted(model, before):
    draft = random_model("llama")
    with holding(draft, rounded(model, Scheme("int4", "fp32", 32))):
        drafted = [text_logits(draft, text) for text in TEXTS]
        found = acceptance(before, drafted)
        assert found == pytest.approx(decoded(draft, model, TEXTS))
    assert 1 < found < acceptance(before, before.logits)
    assert acceptance(Before([TEXTS[0]], [before.logits[0][:10]]), before.logits) == 5
