"""Log-probabilities: the log-softmax of the model's own logits, with and without speculation."""

from dataclasses import replace

import numpy as np
import pytest

from specbuild.runtime import SamplingParams, TokenLogprobs

PROCESSED = SamplingParams(
    max_new_tokens=20,
    temperature=0.7,
    top_k=6,
    top_p=0.9,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    logit_bias={3: 2.0},
    seed=4,
)


def log_softmax(logits):
    row = logits.astype(np.float64)
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.parametrize(("tree", "count"), [("off", 20), ("chain:4", 0), ("best:9", 3)])
@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=20), PROCESSED])
def test_of_every_token_of_a_text(hash_engine, tree, params, count):
    engine, prompt = hash_engine(), [1, 2, 3] * 5
    (result,) = engine.generate(prompt, replace(params, speculation=tree, logprobs=count))
    (plain,) = engine.generate(prompt, replace(params, speculation="off"))
    assert (result.token_ids, plain.logprobs) == (plain.token_ids, None)
    assert (result.metrics.speculative_decoding.num_accepted_draft_tokens > 0) == (tree != "off")
    for at, (token, each) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        want = log_softmax(engine.model([*prompt, *result.token_ids[:at]]))
        best = np.argsort(-want, kind="stable")[:count].tolist()
        assert (each.token_id, [t for t, _ in each.top]) == (token, best)
        assert [each.logprob, *(p for _, p in each.top)] == pytest.approx(want[[token, *best]].tolist(), abs=1e-12)


def test_equal_logits_come_by_id_and_extreme_ones_are_exact():
    logits = np.array([0, 5, 5, -np.inf, 5, 1], dtype=np.float32)
    found, same = TokenLogprobs.of(logits, 4, 2), pytest.approx(log_softmax(logits)[4])
    top = [{"token_id": token, "logprob": same} for token in (1, 2)]
    assert found.to_dict() == {"token_id": 4, "logprob": same, "top": top}
    assert TokenLogprobs.of(np.array([1e4, -1e4], dtype=np.float32), 1, 0).logprob == -2e4
