"""text-generation-inference's texts: tokens together are the text, whole and streamed."""

import pytest

from specbuild.runtime import SamplingParams

PROMPT = "def parse(text):\n"


@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.8}])
def test_a_text_its_details_and_its_stream(client, engine, sampled):
    """A stream has an event for each token, and the last has the text."""
    (result,) = engine.generate(PROMPT, SamplingParams(24, seed=3, **sampled))
    parameters = {"max_new_tokens": 24, "seed": 3, "details": True} | sampled
    told = client.ask("/generate", inputs=PROMPT, parameters=parameters | {"return_full_text": True})
    assert told["generated_text"] == PROMPT + result.text
    details = told["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 24, 3)
    assert [token["id"] for token in details["tokens"]] == result.token_ids
    assert all(token["logprob"] <= 0 and token["special"] is False for token in details["tokens"])
    events = client.events("/generate_stream", inputs=PROMPT, parameters=parameters)
    assert [event["index"] for event in events] == list(range(1, 25))
    assert [event["token"] for event in events] == details["tokens"]
    assert "".join(event["token"]["text"] for event in events) == result.text
    assert [event["generated_text"] for event in events] == [None] * 23 + [result.text]
    last = events[-1]["details"]
    assert {name: last[name] for name in ("finish_reason", "generated_tokens", "seed")}.items() <= details.items()


def test_the_last_tokens_of_a_prompt_count_and_a_stop_sequence_ends_it(client, engine):
    (result,) = engine.generate([engine.encode(PROMPT)[-3:]], [SamplingParams(8, seed=0)])
    told = client.ask("/generate", inputs=PROMPT, parameters={"max_new_tokens": 8, "truncate": 3})
    assert told == {"generated_text": result.text}
    parameters = {"max_new_tokens": 40, "stop": ["\n"], "details": True}
    told = client.ask("/generate", inputs="import os", parameters=parameters)
    assert told["details"]["finish_reason"] == "stop_sequence"
    assert "\n" not in told["generated_text"]


def test_a_grammar_that_is_none_and_a_watermark_are_refused(client):
    grammars = {"json": "x"}, {"json_schema": {"name": "a"}}, {"regex": {}}
    wrong = [{"grammar": {"type": kind, "value": value}} for each in grammars for kind, value in each.items()]
    for parameters, field in [
        ({"watermark": True}, "parameters.watermark"),
        *((each, "grammar.value") for each in wrong),
    ]:
        status, error = client.refusal("/generate", inputs="x", parameters=parameters)
        assert (status, str(error).partition(" ")[0]) == (400, field)
