"""A body for each route of the server with every field that it knows, and what is done to such bodies."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from specbuild.serve.agents.fields import ResponsesRequest
from specbuild.serve.agents.message_fields import CountRequest, MessagesRequest
from specbuild.serve.body import Body
from specbuild.serve.clouds.fields import Continuation, GenerateRequest, PredictRequest
from specbuild.serve.fields import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from specbuild.serve.page.routes import Line

Path = tuple[str | int, ...]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CHOICE = {"type": "function", "function": {"name": "f"}}
JSON_SCHEMA = {"name": "s", "description": "d", "schema": SCHEMA, "strict": True}
STRUCTURE = {
    **{"json": SCHEMA, "regex": "a", "choice": ["a"], "grammar": "start: A", "json_object": True},
    **{"structural_tag": "{}", "after": "x", "disable_fallback": True, "disable_any_whitespace": True},
    **{"disable_additional_properties": False, "whitespace_pattern": " "},
}
SHARED = {  # of ChatFields, and of Sampling
    **{"model": "m", "stream": False, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1},
    **{"frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1, "speculation": "off"},
    **{"priority": 1, "cache_salt": "x", "session": "s", "deadline": 5.0, "reasoning_end": "x"},
}
SAMPLING = SHARED | {
    **{"logit_bias": {"5": 1.0}, "max_tokens": 4, "min_tokens": 1, "n": 2, "stop": ["x", "y"], "stop_token_ids": [1]},
    **{"ignore_eos": True, "skip_special_tokens": True, "user": "u", "request_id": "r", "return_token_ids": True},
    **{"return_token_sources": True, "disable_spec_decode": True, "num_speculative_tokens": 0, "receipt": True},
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA},
    "structured_outputs": STRUCTURE,
}
COMPLETION = SAMPLING | {"prompt": ["x", "y"], "echo": True, "logprobs": 1, "suffix": "x", "best_of": 2}
MESSAGE = {
    **{"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n", "tool_call_id": "t"},
    **{"tool_calls": [{"id": "c"}], "reasoning_content": "r", "annotations": []},
}
TEMPLATE = {"chat_template_kwargs": {"x": 1}, "add_generation_prompt": True}
CHAT = (
    SAMPLING
    | TEMPLATE
    | {
        **{"messages": [MESSAGE], "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 1},
        **{"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": CHOICE, "parallel_tool_calls": True},
    }
)
PART = {"type": "input_text", "text": "x", "annotations": [], "logprobs": [1]}
ITEM = {
    **{"type": "message", "id": "i", "status": "s", "role": "user", "content": [PART], "call_id": "c", "name": "n"},
    **{"arguments": "{}", "output": "x", "summary": [1]},
}
RESPONSE = SHARED | {
    **{"input": [ITEM], "instructions": "x", "previous_response_id": "p", "store": True, "background": False},
    **{"max_output_tokens": 4, "tools": [{"type": "function", **FUNCTION}], "parallel_tool_calls": True},
    **{"tool_choice": {"type": "function", "name": "f"}, "metadata": {"a": "b"}, "truncation": "disabled"},
    **{"include": [], "stop": "x", "user": "u", "chat_template_kwargs": {"x": 1}},
    "text": {"format": {"type": "json_schema", **JSON_SCHEMA}},
}
BLOCK = {
    **{"type": "text", "text": "x", "id": "i", "name": "n", "input": {"a": 1}, "tool_use_id": "t", "is_error": False},
    **{"thinking": "x", "signature": "s", "cache_control": {"a": 1}, "citations": []},
    "content": [{"type": "text", "text": "x", "cache_control": {"a": 1}, "citations": []}],
}
TOOL = {"type": "custom", "name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}
COUNT = {
    **{"model": "m", "messages": [{"role": "user", "content": [BLOCK]}], "system": [{"type": "text", "text": "x"}]},
    **{"tools": [TOOL | {"cache_control": {"a": 1}}], "cache_control": {"a": 1}, "chat_template_kwargs": {"x": 1}},
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
}
MESSAGES = COUNT | SHARED | {"max_tokens": 4, "stop_sequences": ["x"], "metadata": {"user_id": "u"}}
PARAMETERS = {
    **{"max_new_tokens": 4, "do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1},
    **{"frequency_penalty": 0.1, "seed": 1, "stop": ["x"], "truncate": 5, "return_full_text": True, "details": True},
    **{"best_of": 1, "watermark": False, "decoder_input_details": False, "top_n_tokens": 0},
    "grammar": {"type": "json", "value": SCHEMA},
}
GENERATE = {"inputs": "x", "parameters": PARAMETERS, "stream": False}
TOKENIZE = TEMPLATE | {"model": "m", "prompt": "x", "messages": [MESSAGE], "return_token_strs": True}

BODIES: dict[type[Body], dict[str, Any]] = {
    CompletionRequest: COMPLETION,
    ChatRequest: CHAT,
    ResponsesRequest: RESPONSE,
    MessagesRequest: MESSAGES,
    CountRequest: COUNT,
    GenerateRequest: GENERATE,
    PredictRequest: {"instances": [{"prompt": "x"}], "parameters": {"n": 1}},
    Continuation: COMPLETION | {"details": True, "return_full_text": True, "truncate": 5},
    TokenizeRequest: TOKENIZE,
    DetokenizeRequest: {"model": "m", "tokens": [1]},
    Line: {"system": "s", "said": [{"role": "user", "content": "x"}], "line": "x"},
}
NO_VALUES = {"refusal", "audio", "function_call", "encrypted_content", "typical_p", "adapter_id"}  # null and no other


def kinds(base: type[Body] = Body) -> Iterator[type[Body]]:
    """Every kind of body and part of one."""
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def fields(value: Any, path: Path = ()) -> Iterator[tuple[Path, type[Body]]]:
    """Where a body's fields are, those of its parts included, and which kind of body has each."""
    if isinstance(value, Body):
        for name, field in type(value).model_fields.items():
            if name in value.model_fields_set:
                yield (*path, field.alias or name), type(value)
                yield from fields(getattr(value, name), (*path, field.alias or name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from fields(each, (*path, index))


PLACES = [(kind, path) for kind, body in BODIES.items() for path, _ in fields(kind.model_validate(body))]


def put(body: dict[str, Any], path: Path, *value: Any) -> dict[str, Any]:
    """The body with this value at a place, or without the field if there is no value."""
    changed = copy.deepcopy(body)
    parent: Any = changed
    for part in path[:-1]:
        parent = parent[part]
    if value:
        parent[path[-1]] = value[0]
    else:
        del parent[path[-1]]
    return changed
