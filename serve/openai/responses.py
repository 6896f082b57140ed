"""Response bodies: the shapes of OpenAI's API, with vLLM's fields added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict

from specbuild.runtime import Result, SpeculationStats
from specbuild.serve.options import SpecMetrics

_DETAILS = ("acceptance_histogram", "decisions")


class PromptDetails(TypedDict):
    """Prompt tokens that were read from the prefix cache."""

    cached_tokens: int


class CompletionDetails(TypedDict):
    """Of every sample: tokens of its reasoning, and of predictions that came true and that did not."""

    reasoning_tokens: NotRequired[int]
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class Usage(TypedDict):
    """Tokens of a request: each prompt is counted once, the output of every sample."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptDetails]
    completion_tokens_details: NotRequired[CompletionDetails]


class CompletionLogprobs(TypedDict):
    """Log-probabilities of one text by token; `text_offset`: the character at which each token begins."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(TypedDict):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token of the message, and the likeliest tokens in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of one message."""

    content: list[ChatLogprob]


class TokenSource(TypedDict):
    """A token's text, and whether a drafter had proposed it."""

    text: str
    drafted: bool


class Choice(TypedDict):
    """The fields of every sample. `stop_reason` is vLLM's, or "deadline" if time ran out."""

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
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
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
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: NotRequired[dict[str, Any]]


class ChatCompletion(TypedDict):
    """A response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
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


def usage(
    prompt_tokens: int, completion_tokens: int, cached: int | None = None, results: Sequence[Result] = ()
) -> Usage:
    """Return the token usage; `cached`: prompt tokens read from the prefix cache, if known; `results`: all samples."""
    told: Usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached is not None:
        told["prompt_tokens_details"] = {"cached_tokens": cached}
    counts = [result.metrics.speculative_decoding for result in results if result.metrics]
    if predicted := sum(each.num_prediction_tokens for each in counts):
        accepted = sum(each.num_accepted_prediction_tokens for each in counts)
        told["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(predicted - accepted, 0),
        }
    return told


def finish_reason(result: Result) -> tuple[Literal["stop", "length"], str | int | None]:
    """Return OpenAI's finish_reason and vLLM's stop_reason; a text that ran out of time has finish_reason "length"."""
    if result.finish_reason == "stop":
        return "stop", result.stop_reason
    return "length", "deadline" if result.finish_reason == "deadline" else None


def metrics(results: Sequence[Result], how: SpecMetrics) -> dict[str, Any]:
    """Return the `metrics` of samples: the shortest TTFT, the longest wait and latency, and the sums of speculation."""
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
