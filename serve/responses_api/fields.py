"""Request body of /v1/responses by OpenAI's names; sampling parameters beyond OpenAI's have a chat's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from specbuild.serve import limits
from specbuild.serve.request.body import Body
from specbuild.serve.request.fields import Choice, Label, Level, Metadata, Stop


class ChatFields(Body):
    """Fields that the chat has by the same names; the chat checks their bounds."""

    model: Annotated[str, Meta(max_length=limits.LABEL_CHARACTERS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    speculation: str | None = None
    priority: int | None = None
    cache_salt: Label | None = None
    session: Label | None = None
    deadline: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_end: str | None = None
    service_tier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    safety_identifier: Label | None = None


SAMPLING = (*ChatFields.__struct_fields__, "stop", "user", "parallel_tool_calls")  # fields with the same name in a chat


class Part(Body):
    """A text part of an item's content."""

    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: list[Any] | None = None


Parts = str | list[Part]


class Summary(Body):
    """A part of a reasoning's summary. Models here write none; it is accepted and changes nothing."""

    type: Literal["summary_text"]
    text: str


class Item(Body):
    """A message, a function call, a call's output, or reasoning; its type determines which other fields it has."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    id: Label | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: Label | None = None
    name: Label | None = None
    arguments: str | None = None
    output: Parts | None = None
    summary: Annotated[list[Summary], Meta(max_length=limits.TOOLS)] | None = None
    encrypted_content: None = None


class FlatTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChoice(Body, tag_field="type", tag="function"):
    """The function that the model must call."""

    name: Label


class TextFormat(Body):
    """The format of the text: plain text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Label | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Body):
    """Options of the output text."""

    format: TextFormat | None = None
    verbosity: Level | None = None


class EventOptions(Body):
    """Options of a stream. Its events have no padding, so `include_obfuscation` is false."""

    include_obfuscation: bool | None = None


class ReasoningOptions(Body):
    """Options of the reasoning. Models here write no summaries, so `summary` changes nothing."""

    effort: Level | None = None
    summary: Level | None = None


class AllowedFlat(Body, tag_field="type", tag="allowed_tools"):
    """A choice among some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatChoice], Meta(min_length=1, max_length=limits.TOOLS)]


Items = Annotated[list[Item], Meta(min_length=1, max_length=limits.MESSAGES)]


class ResponsesRequest(ChatFields, kw_only=True):
    """The body of /v1/responses."""

    input: str | Items
    instructions: str | None = None
    previous_response_id: Label | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=limits.TOOLS)] | None = None
    tool_choice: Choice | FlatChoice | AllowedFlat | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    metadata: Metadata | None = None
    client_metadata: dict[str, str] | None = None
    stream_options: EventOptions | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    truncation: Literal["disabled"] | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Meta(max_length=1)] | None = None
    reasoning: ReasoningOptions | None = None
    stop: Stop | None = None
    user: Label | None = None
