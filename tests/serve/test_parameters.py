"""Parameters: defaults under what is asked, OpenAI's names, one way to ask for speculation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime import Bundle, SamplingParams
from specbuild.runtime.bundle.bundle import file_record
from specbuild.runtime.bundle.manifest import MANIFEST
from specbuild.runtime.errors import BundleError
from specbuild.serve.errors import ApiError
from specbuild.serve.fields import ChatRequest, CompletionRequest
from specbuild.serve.parameters import DEFAULTS, Caller, defaults_of, sampling

NOBODY = Caller()


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x"} | fields)


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]} | fields)


def of(body: Any, room: int = 100, caller: Caller = NOBODY) -> SamplingParams:
    return sampling(body, DEFAULTS, room, caller)


def test_openais_defaults() -> None:
    assert (of(completion()).max_new_tokens, of(completion(), room=9).max_new_tokens) == (16, 9)
    assert of(chat()).max_new_tokens == 100
    assert (of(chat()).temperature, of(chat()).speculation, of(chat()).logprobs) == (1.0, "auto", None)


def test_the_checkpoints_defaults_and_what_is_asked() -> None:
    own = DEFAULTS | {"temperature": 0.6, "top_k": 50}
    params = sampling(completion(top_k=-1), own, 10, NOBODY)
    assert (params.temperature, params.top_k) == (0.6, 0)


@pytest.mark.parametrize(("seed", "ours"), [(7, 7), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1)])
def test_seeds_of_either_sign(seed: int, ours: int) -> None:
    assert of(completion(seed=seed)).seed == ours


def test_a_length_that_does_not_fit_is_refused_and_its_two_names_are_one() -> None:
    assert of(chat(max_completion_tokens=100)).max_new_tokens == 100
    for body in (completion(max_tokens=101), chat(max_tokens=101), chat(max_completion_tokens=101)):
        with pytest.raises(ApiError) as refused:
            of(body)
        assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    with pytest.raises(ApiError, match="one limit"):
        of(chat(max_tokens=1, max_completion_tokens=1))


@pytest.mark.parametrize(
    ("fields", "speculation"),
    [
        ({"speculation": "best:4"}, "best:4"),
        ({"speculation": "off", "disable_spec_decode": True, "num_speculative_tokens": 0}, "off"),
        ({"disable_spec_decode": False}, "auto"),
        ({"num_speculative_tokens": 3}, "chain:3"),
    ],
)
def test_speculation_by_three_names(fields: dict[str, Any], speculation: str) -> None:
    assert of(completion(**fields)).speculation == speculation


def test_ways_that_contradict_each_other() -> None:
    with pytest.raises(ApiError, match="speculation and disable_spec_decode contradict"):
        of(completion(speculation="auto", disable_spec_decode=True))
    with pytest.raises(ApiError, match="speculation"):
        of(completion(speculation="sideways"))


def test_logprobs_of_both_kinds() -> None:
    assert of(completion(logprobs=3)).logprobs == 3
    assert [of(chat(logprobs=True, top_logprobs=k)).logprobs for k in (None, 0, 5)] == [0, 0, 5]
    assert of(chat(logprobs=False)).logprobs is None
    with pytest.raises(ApiError, match="needs logprobs"):
        of(chat(top_logprobs=2))


def test_the_shorter_deadline_counts() -> None:
    assert of(completion(), caller=Caller(timeout=5)).deadline == 5
    assert of(completion(deadline=2), caller=Caller(timeout=5)).deadline == 2
    assert of(completion()).deadline is None


def test_caches_are_kept_apart_by_caller_and_by_salt() -> None:
    salts = [
        of(completion(**({"cache_salt": salt} if salt else {})), caller=Caller(tenant)).cache_salt
        for tenant in (None, "a", "b")
        for salt in (None, "x", "y")
    ]
    assert salts[0] is None
    assert len({*salts}) == 9


def with_generation_config(bundle: Path, text: str) -> Bundle:
    (bundle / "generation_config.json").write_text(text)
    opened = Bundle.open(bundle)
    files = opened.manifest.files | {"generation_config.json": file_record(bundle / "generation_config.json")}
    object.__setattr__(opened.manifest, "files", files)
    (bundle / MANIFEST).write_text(opened.manifest.to_json())
    return Bundle.open(bundle)


def test_defaults_of_a_bundle(bundle_copy: Path) -> None:
    assert defaults_of(Bundle.open(bundle_copy)) == DEFAULTS
    told = {"temperature": 0.2, "top_p": 0.9, "eos_token_id": 3}
    assert defaults_of(with_generation_config(bundle_copy, json.dumps(told))) == DEFAULTS | {
        "temperature": 0.2,
        "top_p": 0.9,
    }


@pytest.mark.parametrize("text", ["[]", "{", '{"temperature": "hot"}', '{"top_p": 7}'])
def test_defaults_that_are_none(bundle_copy: Path, text: str) -> None:
    with pytest.raises(BundleError, match=r"generation_config\.json is unusable"):
        defaults_of(with_generation_config(bundle_copy, text))
