"""What clients get: the shapes of OpenAI's API, with vLLM's fields beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

from specbuild.runtime import Result, SpeculationStats

SpecMetrics = Literal["none", "summary", "detailed"]
_DETAILS = ("acceptance_histogram", "decisions")


class PromptDetails(TypedDict):
    """Tokens that a prefix cache had."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a request: each prompt's once, every sample's."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptDetails]


class CompletionLogprobs(TypedDict):
    """Of one text, by token; `text_offset`: where each begins, in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(TypedDict):
    """A token that might have been, or is."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Of one message."""

    content: list[ChatLogprob]


class TokenSource(TypedDict):
    """A token's text, and whether a drafter had proposed it."""

    text: str
    drafted: bool


class Choice(TypedDict):
    """What every sample has. `stop_reason`: vLLM's, or "deadline" where time ran out."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    token_sources: NotRequired[list[TokenSource]]
    metrics: NotRequired[dict[str, Any]]
    receipt: NotRequired[dict[str, Any]]


class CompletionChoice(Choice):
    """A sample of a completion."""

    text: str
    logprobs: CompletionLogprobs | None


class ChatMessage(TypedDict):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]


class ChatChoice(Choice):
    """A sample of a chat."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class Completion(TypedDict):
    """A response of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: NotRequired[dict[str, Any]]


class ChatCompletion(TypedDict):
    """A response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: NotRequired[dict[str, Any]]


class ModelCard(TypedDict):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    """A response of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(TypedDict):
    """A response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """A response of /detokenize."""

    prompt: str


def usage(prompt_tokens: int, completion_tokens: int, cached: int | None = None) -> Usage:
    """`cached`: tokens that a prefix cache had, where they are known."""
    told: Usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached is not None:
        told["prompt_tokens_details"] = {"cached_tokens": cached}
    return told


def finish_reason(result: Result) -> tuple[Literal["stop", "length"], str | int | None]:
    """OpenAI's finish_reason and vLLM's stop_reason; what ran out of time is cut, as what reached its length is."""
    if result.finish_reason == "stop":
        return "stop", result.stop_reason
    return "length", "deadline" if result.finish_reason == "deadline" else None


def metrics(results: Sequence[Result], how: SpecMetrics) -> dict[str, Any]:
    """The `metrics` of one sample or of all: the first token's time, the longest wait, what speculation did."""
    own = [result.metrics for result in results if result.metrics]
    if how == "none" or not own:
        return {}
    total = SpeculationStats()
    for each in own:
        total.merge(each.speculative_decoding)
    told = total.to_dict()
    if how == "summary":
        told = {name: value for name, value in told.items() if name not in _DETAILS}
    first = [each.ttft for each in own if each.first_token is not None]
    return {
        "ttft": min(first, default=None),
        "queue_time": max(each.queue_time for each in own),
        "e2el": max(each.e2el for each in own),
        "speculative_decoding": told,
    }
