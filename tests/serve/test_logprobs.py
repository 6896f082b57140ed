"""Log-probabilities: OpenAI's two shapes, and no more of them than memory allows."""

from __future__ import annotations

import pytest

from specbuild.runtime import Engine, SamplingParams, TokenLogprobs
from specbuild.serve import logprobs
from specbuild.serve.errors import ApiError


def test_those_of_a_prompt_are_those_of_the_same_text_decoded(engine: Engine) -> None:
    (told,) = engine.generate("def main(", SamplingParams(max_new_tokens=6, logprobs=2))
    prompt = engine.encode("def main(")
    found = logprobs.of_prompt(engine, [*prompt, *told.token_ids], 2)
    assert found[0] is None
    for ours, want in zip(found[len(prompt) :], told.logprobs or [], strict=True):
        assert ours
        assert (ours.token_id, ours.logprob) == (want.token_id, pytest.approx(want.logprob, abs=1e-4))
    assert logprobs.of_prompt(engine, [5], 2) == [None]


def test_too_much_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "ECHOED_LOGITS", 1000)
    with pytest.raises(ApiError, match="shorten"):
        logprobs.of_prompt(engine, engine.encode("def main("), 1)


def test_infinity_is_a_number(engine: Engine) -> None:
    given = [TokenLogprobs(5, float("-inf"), ((5, float("-inf")), (6, -1.0)))]
    assert logprobs.completion(engine, [5], given, 3)["token_logprobs"] == [-9999.0]
    (content,) = logprobs.chat(engine, given)["content"]
    assert (content["logprob"], content["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
