"""Parameters: defaults under what is asked, OpenAI's names, one way to ask for speculation."""

import json

import pytest
from campaign.bundle_copy import put
from data_files import rows
from route_client import SAID

from specbuild.runtime import Bundle
from specbuild.runtime.errors import BundleError
from specbuild.serve.errors import ApiError
from specbuild.serve.request.body import converted
from specbuild.serve.request.fields import ChatRequest, CompletionRequest
from specbuild.serve.request.parameters import DEFAULTS, Caller, defaults_of, sampling

NOBODY = Caller()


def completion(caller=NOBODY, room=100, **fields):
    return sampling(converted(CompletionRequest, {"prompt": "x"} | fields), DEFAULTS, room, caller)


def chat(**fields):
    return sampling(converted(ChatRequest, {"messages": SAID} | fields), DEFAULTS, 100, NOBODY)


def test_openais_defaults_and_the_checkpoints():
    assert (completion().max_new_tokens, completion(room=9).max_new_tokens, chat().max_new_tokens) == (16, 9, 100)
    assert (chat().temperature, chat().speculation, chat().logprobs, completion().deadline) == (1.0, "auto", None, None)
    assert [chat(logprobs=True, top_logprobs=k).logprobs for k in (None, 5)] == [0, 5]
    own = DEFAULTS | {"temperature": 0.6, "top_k": 50}
    params = sampling(CompletionRequest(prompt="x", top_k=-1), own, 10, NOBODY)
    assert (params.temperature, params.top_k) == (0.6, 0)


def test_a_seed_is_of_64_bits_with_a_sign_or_without():
    assert [completion(seed=seed).seed for seed in (-1, 2**64 - 1, -(2**63))] == [2**64 - 1, 2**64 - 1, 2**63]
    for wrong in (2**64, -(2**63) - 1):
        with pytest.raises(ApiError, match="seed: give one from"):
            sampling(CompletionRequest(prompt="x", seed=wrong), DEFAULTS, 10, NOBODY)


@pytest.mark.parametrize(("fields", "found"), rows("sampling.jsonl"))
def test_fields_of_a_completion(fields, found):
    assert {name: getattr(completion(**fields), name) for name in found} == found


def test_callers_have_a_deadline_and_caches_of_their_own():
    assert [completion(Caller(timeout=5), deadline=own).deadline for own in (None, 2)] == [5, 2]
    salts = [
        completion(Caller(tenant), cache_salt=salt).cache_salt for tenant in (None, *"ab") for salt in (None, *"xy")
    ]
    assert salts[0] is None
    assert len({*salts}) == 9
    assert completion(Caller("a", shares=True), cache_salt="x").cache_salt == completion(cache_salt="x").cache_salt


def test_sessions_of_two_keys_are_two():
    sessions = [completion(Caller(tenant), session=name).session for tenant in (None, *"ab") for name in "xx"]
    assert len({*sessions}) == 3
    assert completion(Caller("a", shares=True), session="x").session == sessions[2]


def with_generation_config(bundle, text):
    put(bundle, "generation_config.json", text.encode(), hashed=True)
    return Bundle.open(bundle)


def test_defaults_of_a_bundle(bundle_copy):
    assert defaults_of(Bundle.open(bundle_copy)) == DEFAULTS
    own = {"temperature": 0.2, "top_p": 0.9}
    told = with_generation_config(bundle_copy, json.dumps(own | {"eos_token_id": 3}))
    assert defaults_of(told) == DEFAULTS | own
    for text in ("[]", "{", '{"temperature": "hot"}', '{"top_p": 7}'):
        with pytest.raises(BundleError, match=r"generation_config\.json is unusable"):
            defaults_of(with_generation_config(bundle_copy, text))
