"""Fields: exact types, and no field is ignored in silence."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specbuild.serve.fields import ChatRequest, CompletionRequest, TokenizeRequest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "1"},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"n": 0},
        {"n": 1.5},
        {"n": True},
        {"n": 10**6},
        {"max_tokens": 0},
        {"stream": "yes"},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"1": 1e9}},
        {"request_id": "two words"},
        {"request_id": "x" * 129},
        {"user": "x" * 257},
        {"stop": ["x"] * 65},
        {"prompt": [["a"]]},
        {"prompt": ["x"] * 65},
        {"prompt": [-1]},
        {"top_p": 0},
        {"stop": ""},
        {"stop": [""]},
    ],
)
def test_what_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": "x"} | fields)


@pytest.mark.parametrize("prompt", ["x", [1, 2], ["x", "y"], [[1], [2, 3]], []])
def test_prompts_of_four_kinds(prompt: Any) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "x"])
def test_parts_are_texts(part: Any) -> None:
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": [part]}]})


def test_the_schema_says_that_there_is_no_other_field() -> None:
    for kind in (CompletionRequest, ChatRequest, TokenizeRequest):
        assert kind.model_json_schema()["additionalProperties"] is False
