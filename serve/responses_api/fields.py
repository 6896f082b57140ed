"""Request body of /v1/responses by OpenAI's names; sampling parameters beyond OpenAI's have a chat's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from specbuild.serve import limits
from specbuild.serve.request.body import Body
from specbuild.serve.request.fields import Choice, Count, Function, Label, Level, Metadata, Schema, SharedFields, Stop

SAMPLING = (  # fields with the same name in a chat
    *SharedFields.__struct_fields__,
    *("chat_template_kwargs", "stop", "user", "parallel_tool_calls"),
)


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


class FlatTool(Function, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]


class FlatChoice(Body, tag_field="type", tag="function"):
    """The function that the model must call."""

    name: Label


class TextFormat(Schema, kw_only=True):
    """The format of the text: plain text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]


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


class ResponsesRequest(SharedFields, kw_only=True):
    """The body of /v1/responses."""

    input: str | Items
    chat_template_kwargs: dict[str, Any] | None = None
    instructions: str | None = None
    previous_response_id: Label | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Count | None = None
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
