"""Request bodies: the fields of each route, by OpenAI's and vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from specbuild.runtime.sampling.parameters import MAX_STOPS
from specbuild.serve import limits

from .body import Body

Name = Annotated[str, Meta(max_length=limits.LABEL_CHARACTERS)]
Label = Annotated[str, Meta(min_length=1, max_length=limits.LABEL_CHARACTERS)]
Level = Annotated[str, Meta(min_length=1, max_length=32)]  # such as low
ToolName = Annotated[str, Meta(pattern="^[A-Za-z0-9_.-]{1,64}$")]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Token = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-100, le=100)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
Likeliest = Annotated[int, Meta(ge=0, le=20)]  # tokens whose log-probabilities are asked for
Tokens = Annotated[list[Token], Meta(max_length=limits.TOKENS)]
Document = str | dict[str, Any]
Metadata = Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=limits.METADATA)]
Bias = Annotated[
    dict[Annotated[str, Meta(pattern="^[0-9]{1,10}$")], Annotated[float, Meta(ge=-1e6, le=1e6)]],
    Meta(max_length=limits.BIASES),
]
StopString = Annotated[str, Meta(min_length=1)]
Stops = Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
Stop = StopString | Stops


class StreamOptions(Body):
    """With `include_usage` a last chunk has the usage; with `continuous_usage_stats` too, every chunk has it so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Schema(Body):
    """A JSON schema with a name. The text follows it whether `strict` is set or not."""

    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the text: plain text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class StructuredFields(Body):
    """vLLM's structured outputs. There is no fallback, so `disable_fallback` changes nothing.

    `after` is an addition: the text is free up to this token, and constrained from there on.
    """

    json: Document | None = None
    regex: str | None = None
    choice: list[str] | None = None
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


Content = str | list[TextPart]


class Prediction(Body):
    """OpenAI's predicted output: what the answer will be, about. It is drafted from, and the answer is the same."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class SharedFields(Body):
    """Fields that all APIs have by the same names."""

    model: Name | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: int | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    safety_identifier: Label | None = None
    service_tier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    session: Label | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Label | None = None
    deadline: Annotated[float, Meta(ge=0.001, le=1e9)] | None = None
    speculation: Level | None = None
    reasoning_end: Name | None = None


class Sampling(SharedFields):
    """Fields that completions and chats have in common."""

    logit_bias: Bias | None = None
    max_tokens: Count | None = None
    truncate_prompt_tokens: Count | None = None
    min_tokens: Token | None = None
    n: Annotated[int, Meta(ge=1, le=limits.SAMPLES)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[Token], Meta(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    request_id: Annotated[str, Meta(pattern=rf"^[!-~]{{1,{limits.REQUEST_ID_CHARACTERS}}}$")] | None = None
    return_token_ids: bool | None = None
    return_token_sources: bool | None = None
    prediction: Prediction | None = None
    disable_spec_decode: bool | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=0, le=4096)] | None = None
    receipt: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None


Prompt = str | Annotated[list[Token | str | Tokens], Meta(max_length=limits.TOKENS)]  # `prompts_of` checks the mixture


class CompletionRequest(Sampling, kw_only=True):
    """The body of /v1/completions. OpenAI's `suffix` is not supported, nor is `best_of` unless it is 1 or `n`."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Likeliest | None = None
    suffix: str | None = None
    best_of: int | None = None


class Message(Body):
    """A message of a chat, as the model's template reads it. OpenAI's other fields are accepted if they are empty."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Content | None = None
    name: Label | None = None
    tool_calls: Annotated[list[dict[str, Any]], Meta(max_length=limits.TOOLS)] | None = None
    tool_call_id: Label | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=limits.MESSAGES)]


class Function(Body):
    """A function that the model may call. With `strict`, its arguments always follow the schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool, which is always a function."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The function's name."""

    name: Name


class NamedTool(Body, tag_field="type", tag="function"):
    """The tool that the model must call."""

    function: FunctionName


class Allowed(Body):
    """Which tools the model may call, and whether it must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=limits.TOOLS)]


class AllowedTools(Body, tag_field="type", tag="allowed_tools"):
    """A choice among some of the tools."""

    allowed_tools: Allowed


Choice = Literal["none", "auto", "required"]
ToolChoice = Choice | NamedTool | AllowedTools


class ChatRequest(Sampling, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    reasoning_effort: Level | None = None
    verbosity: Level | None = None
    enable_thinking: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=limits.TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(Body):
    """The body of /tokenize: a text, or a chat."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body, kw_only=True):
    """The body of /detokenize."""

    model: Name | None = None
    tokens: Tokens
