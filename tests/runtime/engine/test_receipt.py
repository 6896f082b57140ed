"""Receipts: what they say, that JSON brings them back, and that none is believed which was changed."""

import hashlib
import hmac
import json
from dataclasses import replace
from importlib.metadata import version

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime import Receipt, RequestMetrics, Result, SamplingParams, StructuredOutputs
from specbuild.runtime.checked_json import decode
from specbuild.runtime.engine.receipt import (
    Origin,
    ReceiptClass,
    keyed_sha256,
    sha256,
)
from specbuild.runtime.errors import BundleError, OptionError, PromptError

CLASS = ReceiptClass(1, 2, "c" * 64)
ORIGIN = Origin("b" * 64, CLASS)
PARAMS = SamplingParams(
    max_new_tokens=5,
    temperature=0.75,
    top_p=1.0,
    logit_bias={7: 2.0, 3: -0.5},
    stop=("é", "x"),
    stop_token_ids=(4,),
    seed=40,
)
OUTPUT = [5, 6, 7]


def result_of(tokens, reason="stop", seed=41):
    return Result("", tokens, reason, RequestMetrics(2, seed, "auto"))


def receipt_of(reason="stop", params=PARAMS, origin=ORIGIN):
    return Receipt.of(origin, [1, 2], params, result_of(OUTPUT, reason))


def test_what_it_says():
    """Hashes are of JSON that any program can write."""
    said = receipt_of().to_dict()
    parameters = said.pop("parameters")
    text = json.dumps(parameters, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert said == {
        "specbuild_version": version("specbuild-trt"),
        "bundle": "b" * 64,
        "exactness": {"rows": 1, "sequence_rows": 2, "digest": "c" * 64},
        "seed": 41,
        "parameters_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "prompt_sha256": hashlib.sha256(b"[1,2]").hexdigest(),
        "output_sha256": hashlib.sha256(b"[5,6,7]").hexdigest(),
        "num_output_tokens": 3,
        "finish_reason": "stop",
    }
    assert parameters["logit_bias"] == {"7": 2, "3": -0.5}
    assert (parameters["top_p"], parameters["temperature"], parameters["stop"]) == (1, 0.75, ["é", "x"])


def test_every_parameter_is_in_it_or_changes_no_text():
    beside = {"max_tokens", "seed", "constraint", "structured_outputs"}
    same_text = {"n", "logprobs", "prompt_logprobs", "deadline", "priority", "background", "session", "cache_salt"}
    same_text |= {"speculation", "prediction"}
    assert receipt_of().parameters.keys() == SamplingParams.names() - beside - same_text


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"deadline": 9.0, "session": "s", "speculation": "off", "logprobs": 2, "n": 3}, True),
        ({"logit_bias": {3: -0.5, 7: 2}, "top_p": 1}, True),
        *[(other, False) for other in ({"temperature": 0.5}, {"stop": ("x", "é")}, {"ignore_eos": True})],
    ],
)
def test_what_does_not_change_a_text_does_not_change_the_hash(other, same):
    made = receipt_of(params=replace(PARAMS, **other))
    assert (made.parameters_sha256 == receipt_of().parameters_sha256) == (made == receipt_of()) == same


def test_json_brings_it_back():
    """By way of another language's, too, in which 1.0 is 1."""
    made = receipt_of()
    body = decode(json.dumps(made.to_dict()).encode())
    assert Receipt.from_dict(body) == made
    assert Receipt.from_dict({**body, "exactness": None}).exactness is None
    body["parameters"] |= {"top_p": 1.0, "logit_bias": {"7": 2.0, "3": -0.5}}
    assert Receipt.from_dict(body) == made


def test_its_parameters_decode_the_sample_again():
    """One sample alone, of the seed that it had."""
    params = receipt_of(params=replace(PARAMS, n=3, deadline=1.0, logprobs=1)).params("auto")
    assert params == replace(PARAMS, seed=41, speculation="auto")


def test_one_of_before_a_parameter_was_new_is_read():
    body = receipt_of().to_dict()
    del body["parameters"]["ignore_eos"]
    body["parameters_sha256"] = sha256(body["parameters"])
    read = Receipt.from_dict(body)
    assert read.params("auto") == replace(PARAMS, seed=41, speculation="auto")


GOOD = receipt_of().to_dict()
WRONG = {
    **{name: st.none() | st.text(max_size=63) for name in GOOD if "sha256" in name},
    **{name: st.none() | st.integers() for name in ("specbuild_version", "bundle", "finish_reason")},
    "seed": st.integers(max_value=-1) | st.integers(min_value=2**64) | st.text(),
    "num_output_tokens": st.integers(max_value=-1) | st.integers(min_value=PARAMS.max_new_tokens + 1) | st.text(),
    "exactness": st.fixed_dictionaries({"rows": st.integers(max_value=0) | st.text()}).map(GOOD["exactness"].__or__),
    "parameters": st.sampled_from([[], {"temperature": -3}, {"temperature": 3}, {"max_tokens": 3}, {"best_of": 3}]),
    "more": st.integers(),
}


@pytest.mark.parametrize("name", WRONG)
@given(data=st.data())
def test_what_is_none_is_refused_in_one_line(name, data):
    """A field that is missing, too."""
    bodies = [GOOD | {name: data.draw(WRONG[name])}, {field: GOOD[field] for field in GOOD if field != name}]
    for body in bodies[: 1 + (name in GOOD)]:
        with pytest.raises(OptionError, match=r"receipt|parameter|temperature|seed"):
            Receipt.from_dict(body)


@pytest.mark.parametrize("other", [None, [], "receipt", {}, {"choices": []}])
def test_what_is_no_receipt_at_all(other):
    with pytest.raises(OptionError, match="this is no receipt"):
        Receipt.from_dict(other)


def test_what_has_no_receipt():
    class Anything:
        def matcher(self, vocab_size): ...

    with pytest.raises(OptionError, match="constraint"):
        receipt_of(params=replace(PARAMS, constraint=Anything()))
    with pytest.raises(OptionError, match="refused before it ran"):
        Receipt.of(ORIGIN, [1, 2], PARAMS, Result("", [], "error", None))
    with pytest.raises(OptionError, match="of a prompt of 2 tokens, not 3"):
        Receipt.of(ORIGIN, [1, 2, 3], PARAMS, result_of(OUTPUT))


def test_another_bundle_class_or_prompt():
    made, without = receipt_of(), receipt_of(origin=Origin(ORIGIN.bundle, None))
    made.check_origin(ORIGIN)
    made.check_prompt([1, 2])
    for any_class in (False, True):
        with pytest.raises(BundleError, match="another bundle"):
            made.check_origin(Origin("a" * 64, CLASS), any_class)
    others = [(made, here) for here in (None, replace(CLASS, rows=2), replace(CLASS, digest="d" * 64))]
    for receipt, here in (*others, (without, None)):
        with pytest.raises(OptionError, match=r"--any-class|without an exactness class"):
            receipt.check_origin(Origin(ORIGIN.bundle, here))
        receipt.check_origin(Origin(ORIGIN.bundle, here), any_class=True)
    for other in ([1], [2, 1], [1, 2, 3], []):
        with pytest.raises(PromptError, match="another prompt"):
            made.check_prompt(other)


@pytest.mark.parametrize(
    ("reason", "tokens", "ended", "agrees"),
    [
        *[("stop", OUTPUT, "stop", True), ("stop", OUTPUT, "length", False), ("stop", [5, 6, 8], "stop", False)],
        *[("stop", [*OUTPUT, 8], "cancelled", False), ("stop", [5, 6], "stop", False)],
        *[("length", OUTPUT, "length", True), ("length", OUTPUT, "stop", False)],
        ("length", [*OUTPUT, 8], "cancelled", True),  # the receipt's engine took shorter texts
        *[("deadline", OUTPUT, "stop", True), ("deadline", [5, 6], "stop", False)],
        *[("cancelled", [5, 9, 7, 8], "length", False), ("error", [*OUTPUT, 8, 9], "length", True)],
    ],
)
def test_which_results_agree(reason, tokens, ended, agrees):
    assert receipt_of(reason).agrees(result_of(tokens, ended)) == agrees
    whole = receipt_of("length", params=replace(PARAMS, max_new_tokens=3))
    assert whole.agrees(result_of(tokens, ended)) == ((tokens, ended) == (OUTPUT, "length")), (
        "a length that was asked for"
    )


def test_a_structured_output_is_written_down():
    """Unlike a constraint; and a receipt without one is what it was before there were any."""
    outputs = {"json": '{"type": "object", "properties": {"b": {}, "a": {}}}', "any_whitespace": True}
    made = receipt_of(params=replace(PARAMS, structured_outputs=outputs))
    again = Receipt.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again.params().structured_outputs == StructuredOutputs.of(outputs)
    assert again == made
    assert "structured_outputs" not in receipt_of().parameters


def test_a_keyed_hash_is_an_hmac_of_the_same_json():
    assert keyed_sha256(b"key", [1, 2]) == hmac.new(b"key", b"[1,2]", "sha256").hexdigest()
    assert keyed_sha256(b"other", [1, 2]) != keyed_sha256(b"key", [1, 2]) != keyed_sha256(b"key", [1, 3])
