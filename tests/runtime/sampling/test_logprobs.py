"""Log-probabilities: the log-softmax of the model's own logits, with and without speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specbuild.runtime import Engine, SamplingParams, TokenLogprobs

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


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    row = logits.astype(np.float64)
    shifted: NDArray[np.float64] = row - row.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.parametrize(("tree", "count"), [("off", 20), ("chain:4", 0), ("topk:3,3", 20), ("best:9", 3)])
@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=20), PROCESSED])
def test_of_every_token_of_a_text(hash_engine: Any, tree: str, params: SamplingParams, count: int) -> None:
    engine, prompt = hash_engine(), [1, 2, 3] * 5
    (result,) = engine.generate(prompt, replace(params, speculation=tree, logprobs=count))
    (plain,) = engine.generate(prompt, replace(params, speculation="off"))
    assert plain.logprobs is None
    assert result.token_ids == plain.token_ids
    assert (result.metrics.speculative_decoding.num_accepted_draft_tokens > 0) == (tree != "off")
    for at, (token, each) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        want = log_softmax(engine.model([*prompt, *result.token_ids[:at]]))
        assert each.token_id == token
        assert each.logprob == pytest.approx(want[token], abs=1e-12)
        best = np.argsort(-want, kind="stable")[:count].tolist()
        assert [t for t, _ in each.top] == best
        assert [p for _, p in each.top] == pytest.approx(want[best].tolist(), abs=1e-12)


def test_chunks_carry_their_own(hash_engine: Any) -> None:
    engine, params = hash_engine(), SamplingParams(max_new_tokens=20, logprobs=1)
    chunks = list(engine.stream("ab", params))
    assert [p for chunk in chunks for p in chunk.logprobs] == engine.generate("ab", params)[0].logprobs
    for chunk in chunks:
        assert [p.token_id for p in chunk.logprobs] == chunk.token_ids
    assert all(chunk.logprobs is None for chunk in engine.stream("ab", SamplingParams(max_new_tokens=20)))


def test_equal_logits_come_by_id_and_extreme_ones_are_exact() -> None:
    logits = np.array([0, 5, 5, -np.inf, 5, 1], dtype=np.float32)
    found = TokenLogprobs.of(logits, 4, 2)
    assert [token for token, _ in found.top] == [1, 2]
    assert found.logprob == pytest.approx(log_softmax(logits)[4])
    assert TokenLogprobs.of(np.array([1e4, -1e4], dtype=np.float32), 1, 0).logprob == -2e4
    assert found.to_dict() == {
        "token_id": 4,
        "logprob": found.logprob,
        "top": [{"token_id": token, "logprob": found.logprob} for token in (1, 2)],
    }


def test_of_the_reference_pair(bundle: Path, prompts: Sequence[str]) -> None:
    """Against a pass over the text alone; the verified rows differ from it by rounding."""
    params = SamplingParams(max_new_tokens=12, logprobs=4, temperature=0.9, seed=3)
    with Engine.load(bundle, batch_size=3) as engine:
        chosen = [engine.tokenizer.encode(prompt) for prompt in prompts[:3]]
        for tree in ("off", "auto", "topk:4,4"):
            for prompt, result in zip(chosen, engine.generate(chosen, replace(params, speculation=tree)), strict=True):
                for at, each in enumerate(result.logprobs or ()):
                    want = log_softmax(engine.logits([*prompt, *result.token_ids[:at]]))
                    got = [each.logprob, *(p for _, p in each.top)]
                    ids = [each.token_id, *(t for t, _ in each.top)]
                    assert got == pytest.approx(want[ids].tolist(), abs=engine.manifest.exactness_bound)
                    assert each.top[0][1] == pytest.approx(want.max(), abs=engine.manifest.exactness_bound)
                assert len(result.logprobs or ()) == len(result.token_ids) > 0
