"""Structured outputs on the reference pair: valid, the same whatever is drafted, and what went wrong elsewhere."""

import gc
import json
import time
import weakref
from dataclasses import replace

import pytest
from structured_set import check, check_tokens, outputs, rows
from tokenizers import Tokenizer

from specbuild.runtime import Engine, SamplingParams, StructuredOutputs
from specbuild.runtime.errors import OptionError

SOME = rows()[::9] + rows()[205:249:22]  # 30 of all kinds
FORM = {
    "type": "object",
    "properties": {
        "customer_account_identifier": {"type": "integer", "minimum": 1, "maximum": 999},
        "requested_delivery_window": {"enum": ["morning", "afternoon", "evening"]},
        "marketing_communication_consent": {"type": "boolean"},
    },
    "required": ["customer_account_identifier", "requested_delivery_window", "marketing_communication_consent"],
    "additionalProperties": False,
}
PROMPT = "def main(argv):\n"


@pytest.fixture(scope="module")
def one(bundle):
    with Engine.load(bundle) as engine:
        yield engine


def texts(engine, some, temperature, speculation):
    prompts = [f"# an example of a {row['name']}\n" for row in some]
    params = [
        SamplingParams(
            96, temperature, seed=n, speculation=speculation, structured_outputs=outputs(row), cache_salt=speculation
        )
        for n, row in enumerate(some)
    ]
    return engine.generate(prompts, params)


@pytest.mark.soak(only=("0",))
@pytest.mark.nightly
@pytest.mark.parametrize("temperature", [0, 1])
def test_thirty_of_the_set(one, four, temperature):
    """Every finished text validates and is read again; tokens are plain decoding's, alone and in batches, any tree."""
    assert len(SOME) == 30
    vocabulary, finished = one.manifest.models["target"].vocab_size, 0
    expected = texts(one, SOME, temperature, "off")
    for row, result in zip(SOME, expected, strict=True):
        assert result.error is None
        check_tokens(one.constraint(outputs(row)), result.token_ids, vocabulary)
        if result.finish_reason == "stop":
            check(row, result.text)
            finished += 1
    assert finished >= 15
    for engine, speculation in ((one, "auto"), (four, "auto"), (four, "best:8"), (four, "off"), (one, "topk:2,3")):
        got = texts(engine, SOME, temperature, speculation)
        assert [r.token_ids for r in got] == [r.token_ids for r in expected], speculation


@pytest.mark.nightly(but=("auto", "topk:3,2"))
@pytest.mark.parametrize("speculation", ["auto", "chain:4", "topk:3,2", "best:8"])
def test_a_form_is_valid_json_and_ends(four, speculation):
    """Beside a free text; trees verified with linear masks gave others (TensorRT-LLM 18892)."""
    held = SamplingParams(64, speculation=speculation, structured_outputs={"json": FORM})
    free = SamplingParams(12, speculation=speculation)
    form, other = four.generate([PROMPT, PROMPT], [held, free])
    assert set(json.loads(form.text)) == set(FORM["properties"])
    assert form.finish_reason == "stop"
    plain = [
        SamplingParams(64, speculation="off", structured_outputs={"json": FORM}),
        SamplingParams(12, speculation="off"),
    ]
    assert [r.token_ids for r in four.generate([PROMPT] * 2, plain)] == [form.token_ids, other.token_ids]


def test_long_keys_take_few_rounds(one):
    held = SamplingParams(64, structured_outputs={"json": FORM})
    (form,) = one.generate(PROMPT, held)
    told = form.metrics.speculative_decoding
    assert "forced" in (told.decisions or ["forced"])  # a bundle that was not tuned decides nothing
    assert told.mean_acceptance_length > 2


@pytest.mark.nightly(but=("0.0-auto", "1.0-best:8"))
@pytest.mark.parametrize("speculation", ["auto", "best:8"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_after_its_token_the_constraint_begins_wherever_that_lies(one, four, bundle, speculation, temperature):
    """The token inside a drafted window or tree (vLLM 44297, 36138): any that the text comes to stands for it here."""
    asked = SamplingParams(48, temperature, seed=3, speculation=speculation)
    (free,) = one.generate(PROMPT, replace(asked, speculation="off", max_new_tokens=24))
    place = next(at for at in range(6, 24) if free.token_ids[at] not in free.token_ids[:at])
    name = Tokenizer.from_file(str(bundle / "tokenizer.json")).id_to_token(free.token_ids[place])
    asked = replace(asked, structured_outputs=StructuredOutputs(regex="(yes|no), (always|never)", after=name))
    (plain,) = one.generate(PROMPT, replace(asked, speculation="off"))
    for engine in (one, four, one):  # the last time the text is a habit, and the token is drafted
        (result,) = engine.generate(PROMPT, asked)
        assert result.token_ids == plain.token_ids
    assert plain.token_ids[: place + 1] == free.token_ids[: place + 1]
    after = one.decode(plain.token_ids[place + 1 :])
    assert after in [f"{a}, {b}" for a in ("yes", "no") for b in ("always", "never")]
    assert plain.finish_reason == "stop"


def test_lengths_stops_and_samples(four):
    """Nothing is asked after the stop token; what is cut says so; samples are each their own."""
    form = {"json": FORM}
    (cut,) = four.generate(PROMPT, SamplingParams(5, structured_outputs=form))
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)
    (stopped,) = four.generate(PROMPT, SamplingParams(64, structured_outputs=form, stop="window"))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "window")
    assert stopped.text.endswith("requested_delivery_")
    results = four.generate(PROMPT, SamplingParams(64, 1.0, seed=1, n=4, structured_outputs=form))
    for result in results:
        assert set(json.loads(result.text)) == set(FORM["properties"])
    assert len({result.text for result in results}) > 1


def test_cancelling_frees_the_matcher(one):
    handle = one.submit(PROMPT, SamplingParams(400, structured_outputs={"regex": "[a-z ]{900,}"}))
    next(iter(handle))
    matcher = weakref.ref(handle.sequence.sampler.matcher)
    handle.cancel()
    handle.result()
    until = time.monotonic() + 10
    while matcher() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert matcher() is None


def test_what_is_wrong_is_said_before_anything_runs_and_nobody_else_is_touched(four):
    """A grammar that cannot be compiled is its request's error alone."""
    handle = four.submit(PROMPT, SamplingParams(40))
    for wrong in ({"regex": "a("}, {"json": {"type": "nothing"}}, {"grammar": "?"}, {"json": {"not": {}}}):
        with pytest.raises(OptionError, match="structured_outputs cannot be used"):
            four.submit(PROMPT, SamplingParams(structured_outputs=wrong))
    assert len(handle.result().token_ids) == 40


@pytest.mark.nightly(but=("chain:8",))
@pytest.mark.parametrize("speculation", ["auto", "chain:8", "best:8"])
def test_drafts_that_do_not_fit_the_structure_are_never_accepted(four, speculation):
    """The prompt is what lookup drafts from, and most of it illegal; that ended engines (vLLM 27969, 47025)."""
    prompt = '{"requested_delivery_window": "noon", "customer_account_identifier": "x"}\n' * 3
    held = SamplingParams(64, 0.8, seed=2, structured_outputs={"json": FORM}, speculation=speculation)
    expected = four.generate([prompt] * 3, [replace(held, speculation="off", seed=seed) for seed in range(3)])
    found = four.generate([prompt] * 3, [replace(held, seed=seed) for seed in range(3)])
    assert [(r.error, r.token_ids) for r in found] == [(None, r.token_ids) for r in expected]
    for result in found:
        assert set(json.loads(result.text)) == set(FORM["properties"])
