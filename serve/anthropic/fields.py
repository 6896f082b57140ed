"""Request bodies of /v1/messages by Anthropic's names; sampling parameters beyond those have a chat's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from specbuild.serve import limits
from specbuild.serve.request.body import Body
from specbuild.serve.request.fields import Count, Label, Level, SharedFields, Stops, ToolName

Nothing = Annotated[list[Any], Meta(max_length=0)]
SAMPLING = (
    *SharedFields.__struct_fields__,
    "chat_template_kwargs",
    "max_tokens",
)  # fields with the same name in a chat


class TextBlock(Body):
    """A text. `cache_control` is accepted and changes nothing: the beginning of a prompt is cached anyway."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: Nothing | None = None


Texts = str | list[TextBlock]


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
    citations: Nothing | None = None


Blocks = Annotated[list[Block], Meta(min_length=1, max_length=limits.MESSAGES)]


class TurnMessage(Body):
    """A message of the user or of the assistant."""

    role: Literal["user", "assistant"]
    content: str | Blocks


class MessageTool(Body, kw_only=True):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
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
    """Switches thinking before the answer on or off, for templates that can. No budget is enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Label | None = None


class OutputFormat(Body, kw_only=True):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputOptions(Body):
    """Options of the output: its format, and the effort, which only a template can follow."""

    format: OutputFormat | None = None
    effort: Level | None = None


class ContextEdit(Body):
    """An edit of the conversation that leaves all thinking where it is, which is done without."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    """Edits of the conversation."""

    edits: Annotated[list[ContextEdit], Meta(max_length=1)] | None = None


class CountRequest(SharedFields, kw_only=True):
    """The body of /v1/messages/count_tokens, whose sampling parameters change nothing."""

    messages: Annotated[list[TurnMessage], Meta(min_length=1, max_length=limits.MESSAGES)]
    system: Texts | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=limits.TOOLS)] | None = None
    tool_choice: MessageChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputOptions | None = None
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: Count
    stop_sequences: Stops | None = None
    metadata: Metadata | None = None
