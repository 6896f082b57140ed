"""Request bodies of /v1/messages by Anthropic's names; sampling parameters beyond those have a chat's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from specbuild.serve import limits
from specbuild.serve.request.body import LIST, TEXT, Body, Every, told_apart
from specbuild.serve.request.fields import Label, Stops
from specbuild.serve.responses_api.fields import ChatFields

SAMPLING = (*ChatFields.model_fields, "max_tokens")  # fields with the same name in a chat


class TextBlock(Body):
    """A text. `cache_control` is accepted and changes nothing: the beginning of a prompt is cached anyway."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


Texts = Annotated[Annotated[str, TEXT] | Annotated[Every[TextBlock], LIST], told_apart("a string or a list of texts")]


class Block(Body):
    """A text, a tool call, a call's result, or thinking; its type determines which other fields it has."""

    type: Literal["text", "tool_use", "tool_result", "thinking"]
    text: str | None = None
    id: Label | None = None
    name: Label | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Label | None = None
    content: Texts | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    cache_control: dict[str, Any] | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


Blocks = Annotated[Every[Block], Field(min_length=1, max_length=limits.MESSAGES)]


class TurnMessage(Body):
    """A message of the user or of the assistant."""

    role: Literal["user", "assistant"]
    content: Annotated[Annotated[str, TEXT] | Annotated[Blocks, LIST], told_apart("a string or a list of blocks")]


class MessageTool(Body):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class MessageChoice(Body):
    """The tool choice: the model may call tools, must call one, or must call a named one."""

    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(Body):
    """The sender of the request."""

    user_id: Label | None = None


class Thinking(Body):
    """Whether the model thinks before it answers, if its template can be told. A budget is taken and not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    display: Label | None = None


class CountRequest(Body):
    """The body of /v1/messages/count_tokens."""

    model: Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)] | None = None
    messages: Annotated[Every[TurnMessage], Field(min_length=1, max_length=limits.MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[MessageTool], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: MessageChoice | None = None
    thinking: Thinking | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountRequest, ChatFields):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    stop_sequences: Stops | None = None
    metadata: Metadata | None = None
