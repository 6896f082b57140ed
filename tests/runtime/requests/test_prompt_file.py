"""Prompt files: the three kinds of line, what overrides what, and where an error is."""

import json
import sys

import pytest

from specbuild.runtime import Chat, SamplingParams
from specbuild.runtime.errors import PromptError
from specbuild.runtime.requests.prompt_file import Request, read
from specbuild.runtime.sampling.parameters import renamed

DEFAULTS = {"max_new_tokens": 7, "temperature": 0.5, "seed": 1}


def write(tmp_path, *lines):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def test_the_kinds_of_line(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = write(
        tmp_path,
        '{"prompt": "a\u2028b\\ud83d\\ude42"}',
        "   ",
        {"turns": ["one", "two", "three"], "question_id": 1, "category": "c", "reference": ["r"]},
        {"messages": messages},
        {"messages": messages, "tools": [{"name": "f"}], "chat_template_kwargs": {"enable_thinking": False}},
    )
    params = SamplingParams(**DEFAULTS)
    assert read(path, DEFAULTS) == [
        Request("a\u2028b🙂", params),
        Request("one", params, ("one", "two", "three"), "c"),
        Request(Chat(messages), params),
        Request(Chat(messages, [{"name": "f"}], variables={"enable_thinking": False}), params),
    ]


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "5",
        '{"a": 1}',
        '{"prompt": "x", "promt": "y"}',
        '{"prompt": "x", "top_k": -1}',
        '{"prompt": "x", "constraint": {"regex": "a+"}}',
        '{"turns": ["x"], "category": 1}',
        *('{"prompt": 5}', '{"turns": []}', '{"messages": [], "chat_template_kwargs": 5}'),
    ],
)
def test_an_error_names_file_and_line(tmp_path, bad):
    path = write(tmp_path, {"prompt": "fine"}, "", bad, {"prompt": "fine"})
    with pytest.raises(PromptError) as caught:
        read(path, DEFAULTS)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_a_standard_input_that_is_closed_is_said(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(PromptError, match="standard input is closed"):
        read("-", DEFAULTS)


FIELDS = {"max_tokens": 3, "top_k": 3, "n": 2, "logprobs": 0, "logit_bias": {"5": 1.5}, "stop": ["x"]}


@pytest.mark.parametrize("fields", [FIELDS, {"structured_outputs": {"regex": "a+"}, "speculation": "chain:2"}])
def test_sampling_fields_of_a_line_override(tmp_path, fields):
    own, other = read(write(tmp_path, {"prompt": "p", **fields}, {"prompt": "p"}), DEFAULTS)
    assert own.params == SamplingParams(**DEFAULTS | renamed(fields))
    assert own.params != other.params == SamplingParams(**DEFAULTS)
