"""Prompt files: the three kinds of line, what overrides what, and where an error is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime import Chat, SamplingParams
from specbuild.runtime.errors import PromptError
from specbuild.runtime.requests.prompt_file import Request, read
from specbuild.runtime.sampling.parameters import renamed

DEFAULTS: dict[str, Any] = {"max_new_tokens": 7, "temperature": 0.5, "seed": 1}


def write(tmp_path: Path, *lines: Any) -> str:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def test_the_kinds_of_line(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = write(
        tmp_path,
        {"prompt": "a\u2028b"},
        "   ",
        {"turns": ["one", "two", "three"], "question_id": 1, "category": "c", "reference": ["r"]},
        {"messages": messages},
        {"messages": messages, "tools": [{"name": "f"}], "chat_template_kwargs": {"enable_thinking": False}},
    )
    params = SamplingParams(**DEFAULTS)
    assert read(path, DEFAULTS) == [
        Request("a\u2028b", params),
        Request("one", params, ("one", "two", "three"), "c"),
        Request(Chat(messages), params),
        Request(Chat(messages, [{"name": "f"}], variables={"enable_thinking": False}), params),
    ]


@pytest.mark.parametrize("name", sorted(SamplingParams.names() - {"constraint"}))
def test_every_sampling_field_overrides(tmp_path: Path, name: str) -> None:
    values: dict[str, Any] = {
        "max_new_tokens": 3,
        "max_tokens": 3,
        "stop_token_ids": [7],
        "temperature": 0.75,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "logit_bias": {"5": 1.5},
        "seed": 9,
        "stop": ["x"],
        "ignore_eos": True,
        "speculation": "chain:2",
        "n": 2,
        "logprobs": 0,
        "deadline": 1.5,
        "session": "a user's",
        "cache_salt": "a tenant's",
        "priority": -1,
        "background": True,
        "structured_outputs": {"regex": "a+"},
        "min_tokens": 1,
        "skip_special_tokens": False,
    }
    requests = read(write(tmp_path, {"prompt": "p", name: values[name]}, {"prompt": "p"}), DEFAULTS)
    assert requests[0].params == SamplingParams(**DEFAULTS | renamed({name: values[name]}))
    assert requests[0].params != requests[1].params == SamplingParams(**DEFAULTS)


def test_a_constraint_is_an_object_that_no_file_holds(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="constraint must have a method matcher"):
        read(write(tmp_path, {"prompt": "p", "constraint": {"regex": "a+"}}), DEFAULTS)


def test_escaped_and_raw_unicode_are_the_same(tmp_path: Path) -> None:
    raw, escaped = read(write(tmp_path, '{"prompt": "é🙂"}', '{"prompt": "\\u00e9\\ud83d\\ude42"}'), DEFAULTS)
    assert raw == escaped


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "5",
        '{"a": 1}',
        '{"prompt": "x", "promt": "y"}',
        '{"prompt": "x", "top_k": -1}',
        '{"turns": ["x"], "category": 1}',
    ],
)
def test_an_error_names_file_and_line(tmp_path: Path, bad: str) -> None:
    path = write(tmp_path, {"prompt": "fine"}, "", bad, {"prompt": "fine"})
    with pytest.raises(PromptError) as caught:
        read(path, DEFAULTS)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)
