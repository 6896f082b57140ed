"""Request bodies: the fields of each route, by OpenAI's and vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from . import limits
from .errors import ApiError

Label = Annotated[str, Field(min_length=1, max_length=limits.LABEL_CHARACTERS)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Tokens = Annotated[list[Token], Field(max_length=limits.TOKENS)]


class Body(BaseModel):
    """A body with exact types. `check_known` refuses fields that no route knows, unless they are to be ignored."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, json_schema_extra={"additionalProperties": False}
    )


def unknown(value: Any, path: str = "") -> Iterator[str]:
    """Yield the names of a body's unknown fields, such as `messages.0.colour`."""
    if isinstance(value, Body):
        yield from (f"{path}{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from unknown(getattr(value, name), f"{path}{name}.")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from unknown(each, f"{path}{index}.")


def check_known(body: Body) -> None:
    """Raise ApiError if a body has an unknown field."""
    if name := next(unknown(body), None):
        told = name[: limits.LABEL_CHARACTERS]
        raise ApiError(
            400,
            f"unknown field {told!r}: leave it out, or serve with --extra-fields ignore",
            param=told,
            code="unknown_field",
        )


class StreamOptions(Body):
    """With `include_usage` a last chunk has the usage; with `continuous_usage_stats` too, every chunk has it so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Schema(Body):
    """A JSON schema with a name. The text follows it whether `strict` is set or not."""

    name: Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the text: plain text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class StructuredFields(Body):
    """vLLM's structured outputs. There is no fallback, so `disable_fallback` changes nothing.

    `after` is an addition: the text is free up to this token, and constrained from there on.
    """

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    after: Label | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class Sampling(Body):
    """Fields that completions and chats have in common; null means the same as leaving a field out."""

    model: Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[float, Field(ge=-1e6, le=1e6)]] | None
    ) = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.SAMPLES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)] | None = None
    session: Label | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: Annotated[str, Field(pattern=rf"^[!-~]{{1,{limits.REQUEST_ID_CHARACTERS}}}$")] | None = None
    cache_salt: Label | None = None
    deadline: Annotated[float, Field(ge=0.001, le=1e9)] | None = None
    return_token_ids: bool | None = None
    return_token_sources: bool | None = None
    speculation: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    disable_spec_decode: bool | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, le=4096)] | None = None
    receipt: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    reasoning_end: Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)] | None = None


class CompletionRequest(Sampling):
    """The body of /v1/completions. OpenAI's `suffix` is not supported, nor is `best_of` unless it is 1 or `n`."""

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(max_length=limits.PROMPTS)]
        | Annotated[list[Tokens], Field(max_length=limits.PROMPTS)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
    best_of: int | None = None


class TextPart(Body):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a chat, as the model's template reads it. OpenAI's other fields are accepted if they are empty."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[TextPart] | None = None
    name: Label | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=limits.TOOLS)] | None = None
    tool_call_id: Label | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class Function(Body):
    """A function that the model may call. With `strict`, its arguments always follow the schema."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool, which is always a function."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The function's name."""

    name: Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)]


class NamedTool(Body):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=limits.MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(Body):
    """The body of /tokenize: a text, or a chat."""

    model: Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=limits.MESSAGES)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)] | None = None
    tokens: Tokens
