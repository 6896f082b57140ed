"""Prepares a request for its engine: the tokens of its prompts and its parameters, all in one thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from specbuild.runtime import Chat, Constraint, Engine, SamplingParams, StructuredOutputs
from specbuild.serve.errors import ApiError, blaming
from specbuild.serve.limits import ECHOED_LOGITS, PROMPTS
from specbuild.serve.output_parsers.reasoning import TAIL

from . import tools
from .fields import ChatRequest, CompletionRequest, Message, Sampling
from .models import ServedModel
from .parameters import Caller, sampling, structure_field

_EMPTY = {"refusal", "audio", "function_call", "annotations"}  # OpenAI's, empty in messages that clients send back
_OF_TEMPLATES = ("reasoning_effort", "verbosity", "enable_thinking")  # fields that only a chat template can follow
_PROMPTS = "a string, token ids, a list of strings, or a list of lists of token ids"
PromptState = Literal["begun", "ended", None]


class Prepared(NamedTuple):
    """A request that can be decoded: its prompts' tokens and its parameters.

    echoed: the texts of prompts that are repeated. reasoning: whether the prompt's end begins or ends a reasoning.
    constraint: what a text must follow, if that is compiled already; holding it keeps it cached.
    """

    prompts: list[list[int]]
    echoed: list[str]
    params: SamplingParams
    reasoning: PromptState
    constraint: Constraint | None


def prepare(served: ServedModel, body: Sampling, caller: Caller) -> Prepared:
    """Prepare a request for decoding; raises ApiError and SpecbuildErrors."""
    engine = served.engine.engine
    state: PromptState = None
    if isinstance(body, ChatRequest):
        tokens = chat_tokens(engine, body, caller.reading.reasoning is not None)
        prompts, echoed = _truncated(body, [tokens]), list[str]()
        state = _prompt_reasons(engine, body, caller, prompts[0])
        caller = replace(caller, shows=_shows(engine, body, caller))
        if reasoning := caller.reading.reasoning:
            caller = replace(caller, reasoning_end="" if state == "ended" else reasoning.end)
    else:
        assert isinstance(body, CompletionRequest)
        prompts, echoed = _completion(engine, body)
    room = max(engine.max_model_len - max(map(len, prompts)), 1)
    params = sampling(body, served.defaults, room, caller)
    outputs = params.structured_outputs
    with blaming(structure_field(body), "structured_outputs"):
        constraint = engine.known_constraint(StructuredOutputs.of(outputs)) if outputs else None
    return Prepared(prompts, echoed, params, state, constraint)


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """Return a request's prompts, each a text or token ids; raises ApiError for unsupported fields of OpenAI's."""
    if body.suffix is not None:
        raise ApiError(400, "suffix is not supported: models here only go on from a prompt", param="suffix")
    if body.best_of not in (None, 1) and body.best_of != body.n:
        raise ApiError(400, "best_of is not supported: ask for n, and choose", param="best_of")
    given = body.prompt
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given)) or {int}
    if len(kinds) > 1:
        raise ApiError(400, f"prompt: give {_PROMPTS}, and not mixed", param="prompt")
    if kinds == {int}:
        return [given]  # type: ignore[list-item]
    if len(given) > PROMPTS:
        raise ApiError(400, f"prompt: give at most {PROMPTS} prompts", param="prompt")
    return given  # type: ignore[return-value]


def _completion(engine: Engine, body: CompletionRequest) -> tuple[list[list[int]], list[str]]:
    """Return the tokens of a completion's prompts, and their texts if they are repeated."""
    given = prompts_of(body)
    prompts = _truncated(body, [engine.encode(each) for each in given])
    if not body.echo:
        return prompts, []
    if body.logprobs is not None:
        check_echo(engine, prompts)
    shown = prompts if body.truncate_prompt_tokens else given
    return prompts, [each if isinstance(each, str) else engine.decode(each) for each in shown]


def _truncated(body: Sampling, prompts: list[list[int]]) -> list[list[int]]:
    """Return the last tokens of each prompt, if the request says how many."""
    count = body.truncate_prompt_tokens
    return [tokens[-count:] for tokens in prompts] if count else prompts


def check_echo(engine: Engine, prompts: list[list[int]]) -> None:
    """Raise ApiError if a prompt's logits are more than a request may ask for."""
    for tokens in prompts:
        size = 4 * len(tokens) * engine.manifest.models["target"].vocab_size
        if size > ECHOED_LOGITS:
            told = f"echo with logprobs takes {size >> 20} MiB of logits, of {ECHOED_LOGITS >> 20} at most: shorten it"
            raise ApiError(400, told, param="logprobs")


def _prompt_reasons(engine: Engine, body: ChatRequest, caller: Caller, prompt: list[int]) -> PromptState:
    """Return whether a prompt's end begins or ends a reasoning; see `Reasoning.in_prompt`."""
    reasoning = caller.reading.reasoning
    if reasoning is None:
        return None
    if body.reasoning_end == "":
        return "ended"
    return reasoning.in_prompt(engine.decode(prompt[-TAIL:], False))


def _shows(engine: Engine, body: ChatRequest, caller: Caller) -> bool:
    """Return whether a text must show special tokens, because markers of calls or of reasoning are such tokens."""
    known = [engine.tokenizer.token_id(each) for each in caller.reading.markers(bool(body.tools))]
    return any(token is not None and not engine.decode([token]) for token in known)


def chat_of(
    messages: list[Message],
    variables: Mapping[str, Any] | None,
    add_generation_prompt: bool | None = None,
    described: list[dict[str, Any]] | None = None,
) -> Chat:
    """Return a chat, with tools as described, in the form that the model's template reads; raises ApiError."""
    begin = True if add_generation_prompt is None else add_generation_prompt
    plain = [_plain(each) for each in messages]
    with blaming("chat_template_kwargs"):
        Chat(plain[:1], variables=variables or {})
    with blaming("messages"):
        return Chat(plain, described, begin, variables or {})


def requested_chat(body: ChatRequest) -> Chat:
    """Return the chat of a request; raises ApiError."""
    variables = (body.chat_template_kwargs or {}) | _template_fields(body)
    return chat_of(body.messages, variables, body.add_generation_prompt, tools.described(body))


def chat_tokens(engine: Engine, body: ChatRequest, reasons: bool) -> list[int]:
    """Return the tokens of a request's chat; raises ApiError.

    `reasons`: whether the model may reason; one that does not has nothing to be told to leave out.
    """
    for name, value in _template_fields(body).items():
        with blaming("messages"):
            reads = engine.tokenizer.template_reads(name)
        if not reads and (reasons or value is not False):
            raise ApiError(400, f"{name} is not read by this model's chat template: leave it out", param=name)
    return encoded(engine, requested_chat(body))


def encoded(engine: Engine, chat: Chat) -> list[int]:
    """Return a chat's token ids; raises ApiError for the field that the model's template does not take."""
    tokenizer = engine.tokenizer
    if not tokenizer.chats:
        told = "this model has no chat template: serve it with --chat-template hermes, or a file, or use completions"
        raise ApiError(400, told, param="messages")
    with blaming("messages"):
        reads = not chat.tools or tokenizer.template_reads("tools")
    with blaming("messages" if reads else "tools"):
        return engine.encode(chat)


def _template_fields(body: ChatRequest) -> dict[str, Any]:
    return {name: value for name in _OF_TEMPLATES if (value := getattr(body, name)) is not None}


def _plain(message: Message) -> dict[str, Any]:
    """Return the fields that the client gave, in the template's form."""
    known = [name for name in Message.__struct_fields__ if name not in _EMPTY]
    given = {name: value for name in known if (value := getattr(message, name)) is not None}
    if isinstance(message.content, list):
        given["content"] = [{"type": part.type, "text": part.text} for part in message.content]
    if message.tool_calls is not None:
        given["tool_calls"] = tools.read_back(message.tool_calls)
    role = "system" if message.role == "developer" else message.role
    return {"content": None, **given, "role": role}
