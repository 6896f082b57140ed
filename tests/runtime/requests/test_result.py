"""Results and chunks are plain data: what is in them is told as JSON, what is not there is not told."""

import json
from dataclasses import replace

import numpy as np

from specbuild.runtime import Engine, RequestMetrics, SamplingParams, TokenLogprobs
from specbuild.runtime.errors import PromptError
from specbuild.runtime.requests.result import Result

METRICS = RequestMetrics(7, 42, "chain:4", num_output_tokens=2, submitted=1.0, first_token=1.5, finished=2.5)
LOGPROB = TokenLogprobs.of(np.zeros(3, dtype=np.float32), 0, 2)


def test_a_result_is_told_as_json():
    told = Result("ab", [5, 6], "stop", METRICS, [LOGPROB], stop_reason="\n").to_dict()
    assert json.loads(json.dumps(told)) == {
        **{"text": "ab", "token_ids": [5, 6], "finish_reason": "stop", "stop_reason": "\n"},
        **{"logprobs": json.loads(json.dumps([LOGPROB.to_dict()])), "metrics": METRICS.to_dict()},
    }
    refused = Result("", [], "error", None, error=PromptError("the prompt is empty")).to_dict()
    assert (refused["metrics"], refused["error"], "logprobs" in refused) == (None, "the prompt is empty", False)
    assert Result("", [], "cancelled", METRICS, []).to_dict()["logprobs"] == [], "asked for, and none came"
    of_prompt = Result("ab", [5, 6], "stop", METRICS, prompt_logprobs=[None, LOGPROB]).to_dict()["prompt_logprobs"]
    assert of_prompt == [None, LOGPROB.to_dict()], "a prompt's first token has none"


def test_a_result_has_special_tokens_where_that_is_asked_for(bundle):
    """In its pieces too, and stop strings see them."""
    with Engine.load(bundle) as engine:
        (eos,) = engine.manifest.eos_token_ids
        name = engine.decode([eos], skip_special_tokens=False)
        hidden = SamplingParams(max_new_tokens=3, ignore_eos=True, logit_bias={eos: 1e6}, stop=[name[2:]])
        shown = replace(hidden, skip_special_tokens=False)
        found = [
            (each.text, len(each.token_ids)) for params in (hidden, shown) for each in engine.generate("x", params)
        ]
        assert found == [("", 3), (name[:2], 1)]
        assert "".join(chunk.text for chunk in engine.stream("x", replace(shown, stop=()))) == 3 * name
