"""Replays: a text that is decoded again is proven in both ways, and one that was not made so is not."""

import json
from dataclasses import replace

import pytest

from specbuild.runtime import Engine, Receipt, SamplingParams
from specbuild.runtime.engine.receipt import Origin, sha256
from specbuild.runtime.engine.replay import replay
from specbuild.runtime.errors import EngineClosedError, ExecutionError, OptionError, PromptError

NEW_TOKENS = 24
ASKED = (
    SamplingParams(NEW_TOKENS),
    SamplingParams(NEW_TOKENS, temperature=0.9, top_p=0.95, repetition_penalty=1.1, n=2, speculation="best:16"),
    SamplingParams(
        NEW_TOKENS, temperature=0.7, seed=2**64 - 1, n=2, stop=("(",), logit_bias={11: 1.5}, ignore_eos=True
    ),
)


@pytest.fixture(scope="module")
def engine(bundle):
    with Engine.load(bundle, batch_size=2) as loaded:
        yield loaded


def forged(receipt, **fields):
    return replace(receipt, **fields)


@pytest.mark.slow(but=("greedy",))
@pytest.mark.parametrize("params", ASKED, ids=["greedy", "sampled", "stopped"])
def test_what_was_served_is_proven_elsewhere(engine, other, prompts, params):
    """Served in a batch, with any tree; proven by another engine, from what JSON has kept."""
    texts = prompts[:3]
    for number, result in enumerate(engine.generate(texts, params)):
        text = texts[number // params.n]
        made = engine.receipt(engine.tokenizer.encode(text), params, result)
        assert made.bundle == engine.manifest.digest
        assert made.exactness
        found = other.replay(Receipt.from_dict(json.loads(json.dumps(made.to_dict()))), text)
        assert found.proven, found.to_dict()
        assert found.same_class
        assert found.plain.token_ids == found.speculative.token_ids == result.token_ids
        assert found.plain.metrics.speculation == "off"
        assert found.speculative.metrics.speculation != "off"


@pytest.mark.slow
def test_other_tokens_are_not_proven(engine, prompts):
    """Of another seed or parameter; which tokens and ends agree is in test_receipt.py."""
    params = SamplingParams(NEW_TOKENS, temperature=1.0, seed=3, ignore_eos=True)
    (result,) = engine.generate(prompts[0], params)
    made = engine.receipt(engine.tokenizer.encode(prompts[0]), params, result)
    hotter = {**made.parameters, "temperature": 2}
    others = [{"seed": 4}, {"parameters": hotter, "parameters_sha256": sha256(hotter)}]
    assert engine.replay(made, prompts[0]).proven
    for other in others:
        told = engine.replay(forged(made, **other), prompts[0]).to_dict()
        assert told["proven"] is told["plain"] is told["speculation"] is False


@pytest.mark.parametrize(("count", "reason"), [(0, "cancelled"), (7, "deadline"), (7, "error")])
def test_what_was_cut_off_is_proven_as_far_as_it_came(engine, prompts, count, reason):
    """And not decoded much farther."""
    params, tokens = SamplingParams(100, ignore_eos=True), engine.tokenizer.encode(prompts[0])
    (result,) = engine.generate(prompts[0], replace(params, max_new_tokens=20))
    cut = replace(result, token_ids=result.token_ids[:count], finish_reason=reason)
    found = engine.replay(engine.receipt(tokens, params, cut), tokens)
    assert (found.proven, found.to_dict()["whole"]) == (True, False)
    assert len(found.plain.token_ids) < 100


def test_what_is_refused(hash_engine):
    engine = ready(hash_engine())
    made = receipt_by(engine, SamplingParams(4))
    with pytest.raises(PromptError, match="another prompt"):
        engine.replay(made, [1, 3], any_class=True)
    raising = [engine.model.RAISES, 2]
    with pytest.raises(ExecutionError, match="the model raises"):
        engine.replay(forged(made, prompt_sha256=sha256(raising)), raising, any_class=True)


def test_a_text_that_is_longer_than_the_engine_takes(hash_engine):
    """Is no difference."""
    engine = ready(hash_engine())
    made = receipt_by(engine, SamplingParams(500))
    assert engine.replay(made, [1, 2], any_class=True).proven
    with pytest.raises(OptionError, match=f"after {made.num_output_tokens} tokens, the receipt has 300"):
        engine.replay(forged(made, num_output_tokens=300), [1, 2], any_class=True)


@pytest.mark.parametrize("cut", ["off", "auto"])
def test_an_engine_that_is_closed_meanwhile_says_so(hash_engine, cut):
    """In whichever way: tokens that never came are no other ones."""
    quiet, halted = ready(hash_engine()), ready(hash_engine(gated=True))
    made = receipt_by(quiet, SamplingParams(40, ignore_eos=True))

    def submit(prompt, params):
        if params.speculation != cut:
            return quiet.submit(prompt, params)
        handle = halted.submit(prompt, params)
        halted.gate.halted()
        handle.cancel()
        halted.gate.open()
        return handle

    with pytest.raises(EngineClosedError, match="closed before the text was decoded"):
        replay(submit, Origin("e" * 64, None), made, [1, 2])


def ready(engine):
    engine.manifest.digest = "e" * 64
    return engine


def receipt_by(engine, params):
    (result,) = engine.generate([[1, 2]], params)
    return engine.receipt([1, 2], params, result)


@pytest.fixture(scope="module")
def other(bundle):
    with Engine.load(bundle, prefix_caching=False) as loaded:
        yield loaded
