"""One seed, one text: whatever is asked for beside it, whatever was asked before, in every precision."""

import random

import pytest

from specbuild.runtime import Engine, SamplingParams

TREES = ("off", "auto", "chain:1", "chain:4", "topk:2,3", "topk:4,4", "best:8", "best:16")
NEW_TOKENS = 32


@pytest.fixture(scope="module", params=["fp32", "int8"])
def exact(request, bundle, pair, once, build_shared):
    if request.param == "fp32":
        return bundle
    models = {name: str(pair / name) for name in ("target", "draft")}
    built = once("int8.bundle", lambda path: build_shared(**models, output=path, precision="int8", tune=False))
    return built


def asked(index, speculation=None):
    """The number of a prompt, and its parameters: the same but for what drafts."""
    rng = random.Random(index)
    how = rng.choice([{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9, "top_k": 50}])
    number, tree = rng.randrange(1 << 30), rng.choice(TREES)
    return number, SamplingParams(NEW_TOKENS, seed=index, speculation=speculation or tree, **how)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [24, pytest.param(10_000, marks=pytest.mark.soak)])
def test_no_text_differs(exact, prompts, count):
    """Batches of four with trees mixed and prefixes cached, against plain decoding alone."""
    numbers = list(range(count))
    alone, mixed = ([asked(index, speculation) for index in numbers] for speculation in ("off", None))
    with Engine.load(exact, prefix_caching=False) as engine:
        assert engine.exact
        expected = [
            r.token_ids for r in engine.generate([prompts[n % len(prompts)] for n, _ in alone], [p for _, p in alone])
        ]
    random.Random(count).shuffle(numbers)
    with Engine.load(exact, batch_size=4) as engine:
        each = [mixed[index] for index in numbers]
        results = engine.generate([prompts[n % len(prompts)] for n, _ in each], [params for _, params in each])
    differing = [i for i, result in zip(numbers, results, strict=True) if result.token_ids != expected[i]]
    told = [result.metrics.speculative_decoding for result in results if result.metrics]
    rounds, accepted = (
        sum(getattr(each, name) for each in told) for name in ("num_spec_steps", "num_accepted_draft_tokens")
    )
    print(f"{count} texts, {rounds} rounds that drafted, {accepted} drafted tokens accepted: {differing}")
    assert not differing
    assert accepted
