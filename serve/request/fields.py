"""Request bodies: the fields of each route, by OpenAI's and vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from specbuild.runtime.sampling.parameters import MAX_STOPS
from specbuild.serve import limits

from .body import LIST, OBJECT, TEXT, Body, Every, at_most, json_type, told_apart

Label = Annotated[str, Field(min_length=1, max_length=limits.LABEL_CHARACTERS)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Tokens = Annotated[Every[Token], Field(max_length=limits.TOKENS)]
Document = Annotated[Annotated[str, TEXT] | Annotated[dict[str, Any], OBJECT], told_apart("an object or a string")]
Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], at_most(limits.METADATA)]
Bias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], Annotated[float, Field(ge=-1e6, le=1e6)]],
    at_most(limits.BIASES),
]
StopString = Annotated[str, Field(min_length=1)]
Stops = Annotated[list[StopString], Field(max_length=MAX_STOPS)]
Stop = Annotated[Annotated[StopString, TEXT] | Annotated[Stops, LIST], told_apart("a string or a list of strings")]


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

    json_: Annotated[Document | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Every[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Document | None = None
    after: Label | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class TextPart(Body):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, TEXT] | Annotated[Every[TextPart], LIST], told_apart("a string or a list of text parts")
]


class Prediction(Body):
    """OpenAI's predicted output: what the answer will be, about. It is drafted from, and the answer is the same."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Sampling(Body):
    """Fields that completions and chats have in common."""

    model: Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Bias | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.SAMPLES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)] | None = None
    safety_identifier: Label | None = None
    metadata: Metadata | None = None
    store: Literal[False] | None = None
    service_tier: Label | None = None
    prompt_cache_key: Label | None = None
    session: Label | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: Annotated[str, Field(pattern=rf"^[!-~]{{1,{limits.REQUEST_ID_CHARACTERS}}}$")] | None = None
    cache_salt: Label | None = None
    deadline: Annotated[float, Field(ge=0.001, le=1e9)] | None = None
    return_token_ids: bool | None = None
    return_token_sources: bool | None = None
    speculation: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    prediction: Prediction | None = None
    disable_spec_decode: bool | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, le=4096)] | None = None
    receipt: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    reasoning_end: Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)] | None = None


_TEXTS, _IDS, _ID_LISTS = Tag("[texts]"), Tag("[ids]"), Tag("[id lists]")
_LISTS = {str: _TEXTS, int: _IDS, list: _ID_LISTS}  # by the type of their items


def _prompt_kind(value: Any) -> str | None:
    """Return the tag of a prompt's kind; None for a list of mixed items."""
    if not isinstance(value, list):
        return json_type(value)
    kinds = set(map(type, value)) or {int}
    return _LISTS.get(kinds.pop(), _IDS).tag if len(kinds) == 1 else None


_PROMPTS = "a string, token ids, a list of strings, or a list of lists of token ids, and not mixed"
Prompt = Annotated[
    Annotated[str, TEXT]
    | Annotated[Tokens, _IDS]
    | Annotated[Every[str], Field(max_length=limits.PROMPTS), _TEXTS]
    | Annotated[Every[Tokens], Field(max_length=limits.PROMPTS), _ID_LISTS],
    Discriminator(_prompt_kind, "wrong_type", f"Input should be {_PROMPTS}"),
]


class CompletionRequest(Sampling):
    """The body of /v1/completions. OpenAI's `suffix` is not supported, nor is `best_of` unless it is 1 or `n`."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: str | None = None
    best_of: int | None = None


class Message(Body):
    """A message of a chat, as the model's template reads it. OpenAI's other fields are accepted if they are empty."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content | None = None
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


class Allowed(Body):
    """Which tools the model may call, and whether it must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=limits.TOOLS)]


class AllowedTools(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


Choice = Annotated[Literal["none", "auto", "required"], TEXT]
ALLOWED = Tag("[allowed]")


def _choice_kind(value: Any) -> str:
    """Return the tag of a choice's kind."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return ALLOWED.tag if kind == "allowed_tools" else json_type(value)


_CHOICES = "none, auto, required, or an object that names a function, or allowed_tools"
CHOICES = Discriminator(_choice_kind, "wrong_type", f"Input should be {_CHOICES}")
ToolChoice = Annotated[Choice | Annotated[NamedTool, OBJECT] | Annotated[AllowedTools, ALLOWED], CHOICES]
Level = Annotated[str, Field(min_length=1, max_length=32)]  # such as low


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: Annotated[Every[Message], Field(min_length=1, max_length=limits.MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: Level | None = None
    verbosity: Level | None = None
    enable_thinking: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(Body):
    """The body of /tokenize: a text, or a chat."""

    model: Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)] | None = None
    prompt: str | None = None
    messages: Annotated[Every[Message], Field(min_length=1, max_length=limits.MESSAGES)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: Annotated[str, Field(max_length=limits.LABEL_CHARACTERS)] | None = None
    tokens: Tokens
