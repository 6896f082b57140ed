"""Sampling parameters of a request: what the client asks for, over the checkpoint's and OpenAI's defaults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specbuild.runtime import Bundle, SamplingParams
from specbuild.runtime.bundle.manifest import GENERATION_CONFIG
from specbuild.runtime.errors import BundleError, OptionError
from specbuild.serve.errors import ApiError, blaming
from specbuild.serve.output_parsers.reading import Reading

from .fields import ChatRequest, CompletionRequest, Sampling
from .structured import structured

COMPLETION_TOKENS = 16  # OpenAI's default
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_SAME = (  # fields with the same name in SamplingParams
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_p", "min_p"),
    *("logit_bias", "stop", "stop_token_ids", "ignore_eos", "priority", "min_tokens", "skip_special_tokens"),
)
_MAX_JSON = 1 << 20


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, and the server's decisions about it.

    Args:
        tenant: The hash of its API key; None: there are no keys.
        shares: Whether it shares cached prompts with other keys.
        timeout: Seconds that the server allows.
        speculates: Whether anything may be drafted for it.
        reasoning_end: The server's token that ends a reasoning, see `structured`.
        speculation: The speculation that a canary chose; None: the request's own.
        reading: How turns are read.
        shows: Whether a text must show special tokens so that it can be read.
    """

    tenant: str | None = None
    shares: bool = False
    timeout: float | None = None
    speculates: bool = True
    reasoning_end: str | None = None
    speculation: str | None = None
    reading: Reading = field(default_factory=Reading)
    shows: bool = False


def defaults_of(bundle: Bundle) -> dict[str, Any]:
    """Return a bundle's sampling defaults: those of its checkpoint over OpenAI's; raises BundleError."""
    if GENERATION_CONFIG not in bundle.manifest.files:
        return dict(DEFAULTS)
    try:
        told = json.loads(bundle.read(GENERATION_CONFIG, _MAX_JSON))
        given = {name: told[name] for name in SamplingParams.OF_CHECKPOINTS if told.get(name) is not None}
        SamplingParams(**given)
    except (ValueError, AttributeError, OptionError) as error:
        raise BundleError(f"{bundle.path(GENERATION_CONFIG)} is unusable ({error}): build the bundle again") from None
    return DEFAULTS | given


def sampling(body: Sampling, defaults: Mapping[str, Any], room: int, caller: Caller) -> SamplingParams:
    """Return the sampling parameters of a request.

    Args:
        body: The request's fields.
        defaults: The model's sampling defaults.
        room: Tokens that the longest prompt leaves in the context.
        caller: Who sends the request.

    Raises:
        ApiError: If a value is not allowed, fields contradict each other or ask for more tokens than there is room.
    """
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)  # vLLM's -1 is off, as is 0
    if body.seed is not None:
        if not -(2**63) <= body.seed < 2**64:
            raise ApiError(400, "seed: give one from -2^63 to 2^64 - 1", param="seed")
        given["seed"] = body.seed % 2**64
    if body.prediction:
        given["prediction"] = body.prediction.text
    with blaming(structure_field(body), "structured_outputs"):
        outputs = structured(body, caller.reading, caller.reasoning_end)
    if caller.shows or (outputs and outputs.after):
        given.setdefault("skip_special_tokens", False)  # so that the text shows where its reasoning ends
    if body.session is not None:  # what is learned of a session stays with its key
        given["session"] = salt_of(caller.tenant, body.session)
    deadlines = [each for each in (body.deadline, caller.timeout) if each is not None]
    ways = _speculation(body)
    given["speculation"] = (caller.speculation or next(iter(ways.values()), "auto")) if caller.speculates else "off"
    served = {
        **{"max_new_tokens": _max_new_tokens(body, room), "n": body.n or 1, "logprobs": _logprobs(body)},
        "prompt_logprobs": body.logprobs if isinstance(body, CompletionRequest) and body.echo else None,
        **{
            "deadline": min(deadlines, default=None),
            "cache_salt": salt_of(None if caller.shares else caller.tenant, cache_key(body)),
        },
        "structured_outputs": outputs,
    }
    return _checked({**defaults, **served}, given, {"speculation": next(iter(ways), "speculation")})


def _checked(served: Mapping[str, Any], given: Mapping[str, Any], names: Mapping[str, str]) -> SamplingParams:
    """Return the sampling parameters of what is given over what is served; raises ApiError for the first wrong field.

    `names`: the request's names of fields that have others here.
    """
    try:
        return SamplingParams(**{**served, **given})
    except OptionError as error:
        refused = error
    params = dict(served)
    for name, value in given.items():
        params[name] = value
        with blaming(names.get(name, name)):
            SamplingParams(**params)
    raise refused


def structure_field(body: Sampling) -> str | None:
    """Return the name of the field that constrains a request's text; None if there is none."""
    constrains = {
        "response_format": body.response_format is not None and body.response_format.type != "text",
        "structured_outputs": body.structured_outputs is not None,
        "tools": isinstance(body, ChatRequest) and bool(body.tools),
    }
    return next((name for name, holds in constrains.items() if holds), None)


def speculation_field(body: Sampling) -> str | None:
    """Return the name of the field that asks for speculation; None if there is none."""
    return next(iter(_speculation(body)), None)


def _max_new_tokens(body: Sampling, room: int) -> int:
    asked, name = body.max_tokens, "max_tokens"
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        if asked is not None:
            raise ApiError(400, "max_tokens and max_completion_tokens are one limit: give one", param="max_tokens")
        asked, name = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked = min(room, COMPLETION_TOKENS) if isinstance(body, CompletionRequest) else room
    if body.min_tokens is not None and body.min_tokens > asked:
        told = f"min_tokens is {body.min_tokens}, and the text has {asked} tokens at most: raise {name}"
        raise ApiError(400, told, param="min_tokens")
    if asked > room:
        raise ApiError(
            400,
            f"{name} is {asked}, and the prompt leaves room for {room}: ask for fewer, or shorten the prompt",
            param=name,
            code="context_length_exceeded",
        )
    return asked


def _logprobs(body: Sampling) -> int | None:
    if isinstance(body, CompletionRequest):
        return body.logprobs
    assert isinstance(body, ChatRequest)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _speculation(body: Sampling) -> dict[str, str]:
    """Return the speculation that a request asks for, by its fields for it; raises ApiError if they contradict."""
    ways = {
        "speculation": body.speculation,
        "disable_spec_decode": "off" if body.disable_spec_decode else None,
        "num_speculative_tokens": _chain(body.num_speculative_tokens),
    }
    asked = {name: way for name, way in ways.items() if way is not None}
    if len({*asked.values()}) > 1:
        told = " and ".join(asked)
        raise ApiError(400, f"{told} contradict each other: give one of them", param=next(iter(asked)))
    return asked


def _chain(tokens: int | None) -> str | None:
    if tokens is None:
        return None
    return f"chain:{tokens}" if tokens else "off"


def cache_key(body: Sampling) -> str | None:
    """Return what separates a request's cached prompts: `cache_salt`, OpenAI's `prompt_cache_key`, or both."""
    keys = [each for each in (body.cache_salt, body.prompt_cache_key) if each is not None]
    return json.dumps(keys) if len(keys) > 1 else next(iter(keys), None)


def salt_of(tenant: str | None, salt: str | None) -> str | None:
    """Return the salt that separates prefix caches by tenant and by the request's own salt; None: shared."""
    if tenant is None and salt is None:
        return None
    return hashlib.sha256(json.dumps([tenant, salt]).encode()).hexdigest()
