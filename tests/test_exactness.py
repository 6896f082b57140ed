"""End to end on the reference pair: the tokens are transformers' and plain decoding's, whatever drafts."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from specbuild.measure.exactness import compare, plain
from specbuild.runtime import Engine, SamplingParams

NEW_TOKENS = 40
TREES = ("chain:4", "topk:2,3", "topk:4,4", "best:16")
WAYS = ("off", "auto", *TREES)
DRAFTERS = ("model", "ngram", None)
GOLDEN = Path(__file__).parent / "data" / "golden.json"
SAMPLING = (
    SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(temperature=1.0, top_k=40, seed=2),
    SamplingParams(temperature=1.2, min_p=0.05, seed=3),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.1, seed=4),
    SamplingParams(
        temperature=0.9, frequency_penalty=0.5, presence_penalty=0.3, logit_bias={10: 2.0, 11: -5.0}, seed=5
    ),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, seed=6),
)
KEPT = (  # what drafts and how, which others do not say
    *(f"model-batch1-{tree}" for tree in ("chain:4", "best:16")),
    *(f"model-batch4-{tree}" for tree in ("topk:4,4", "best:16")),
    *("ngram-batch4-chain:4", "None-batch4-best:16"),
    *(f"{drafter}-batch{size}-{way}" for drafter in DRAFTERS for size in (1, 4) for way in ("off", "auto")),
)


@pytest.fixture(scope="module")
def tokens(bundle, prompts):
    with Engine.load(bundle) as engine:
        return [engine.tokenizer.encode(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def references(pair, tokens):
    """What `transformers` generates greedily in float32."""
    from specbuild.builder.frontend import checkpoint
    from specbuild.builder.frontend.reference import greedy

    model = checkpoint.load(checkpoint.find(str(pair / "target")), "eager")
    return [reference.tokens for reference in greedy(model, tokens, NEW_TOKENS, [0])]


@pytest.fixture(scope="module", params=[(d, b) for d in DRAFTERS for b in (1, 4)], ids=lambda p: f"{p[0]}-batch{p[1]}")
def engine(bundle, request):
    drafter, batch_size = request.param
    with Engine.load(bundle, drafter=drafter, batch_size=batch_size) as loaded:
        yield loaded


@pytest.mark.soak(but=KEPT)
@pytest.mark.nightly
@pytest.mark.parametrize("tree", WAYS)
def test_greedy_equals_transformers(engine, tokens, references, tree):
    some = slice(WAYS.index(tree) % 2, None, 2)  # half, each half three times
    params = [SamplingParams(max_new_tokens=NEW_TOKENS, seed=0, speculation=tree)] * len(tokens[some])
    case = compare(engine, tree, tokens[some], params, references[some])
    assert case.exact, case.divergences
    assert len(case.divergences) <= 1  # near-ties are rare


@pytest.fixture(scope="module")
def sampled(engine, tokens):
    """Parameters that differ from prompt to prompt, and the tokens of plain decoding with them."""
    params = [replace(SAMPLING[i % len(SAMPLING)], max_new_tokens=24) for i in range(len(tokens))]
    return params, plain(engine, tokens, params)


@pytest.mark.soak(but=KEPT)
@pytest.mark.nightly(but=("model-batch4-topk:4,4",))
@pytest.mark.parametrize("tree", TREES)
def test_sampling_equals_plain_decoding(engine, tokens, sampled, tree):
    """Per-request parameters, shuffled: every sequence decides as it would alone."""
    params, expected = sampled
    order = list(range(len(tokens)))
    random.Random(0).shuffle(order)
    order = order[TREES.index(tree) % 2 :: 2]  # half, each half twice
    mixed = [replace(params[i], speculation=tree if i % 5 else "off") for i in order]
    case = compare(engine, tree, [tokens[i] for i in order], mixed, [expected[i] for i in order])
    assert case.exact, case.divergences


@pytest.mark.nightly(but=("None-batch4",))
def test_another_seed_gives_another_text(engine, tokens):
    one, other = (
        engine.generate(tokens[:6], SamplingParams(max_new_tokens=24, temperature=1.0, seed=seed)) for seed in (1, 2)
    )
    assert [r.token_ids for r in one] != [r.token_ids for r in other]


def test_golden_tokens(bundle):
    """Token ids as they were when this was written, greedy and seeded."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    with Engine.load(bundle) as engine:
        for entry in golden:
            assert (
                engine.generate(entry["prompt"], SamplingParams(**entry["params"]))[0].token_ids == entry["token_ids"]
            )


def first_tokens(bundle, prompt, count, temperature):
    params = [SamplingParams(max_new_tokens=1, temperature=temperature, seed=seed) for seed in range(count)]
    with Engine.load(bundle, batch_size=4) as engine:
        return [result.token_ids[0] for result in engine.generate([list(prompt)] * count, params)]


@pytest.mark.soak
@pytest.mark.nightly
def test_first_tokens_follow_the_softmax(bundle, tokens):
    """χ² of 20,000 first tokens against softmax; a sampler at another temperature fails it."""
    import numpy as np

    count, prompt = 20_000, tokens[2]
    with Engine.load(bundle) as engine:
        logits = engine.logits(prompt).astype(np.float64)
    probability = np.exp(logits - logits.max())
    probability /= probability.sum()

    def p_value_above_one_in_a_thousand(drawn):
        order = np.argsort(-probability)
        likely = order[: int((probability * count >= 10).sum())]
        observed = np.bincount(drawn, minlength=len(probability)).astype(np.float64)
        bins = np.append(observed[likely], count - observed[likely].sum())
        expected = count * np.append(probability[likely], 1 - probability[likely].sum())
        statistic, freedom = float(((bins - expected) ** 2 / expected).sum()), len(bins) - 1
        # Wilson-Hilferty: the cube root of χ²/k is nearly normal; 3.0902 is its 99.9th percentile.
        bound = freedom * (1 - 2 / (9 * freedom) + 3.0902 * (2 / (9 * freedom)) ** 0.5) ** 3
        return statistic < bound

    assert p_value_above_one_in_a_thousand(first_tokens(bundle, prompt, count, 1.0))
    assert not p_value_above_one_in_a_thousand(first_tokens(bundle, prompt, count // 4, 1.1) * 4)
