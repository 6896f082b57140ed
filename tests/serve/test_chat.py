"""Chats: messages as the template reads them."""

from __future__ import annotations

from typing import Any

import pytest

from specbuild.serve.chat import chat_of
from specbuild.serve.errors import ApiError
from specbuild.serve.fields import Message


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        ({"role": "user", "content": "x"}, {"role": "user", "content": "x"}),
        ({"role": "assistant"}, {"role": "assistant", "content": None}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "colour": 1}], "mood": 1},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ),
        (
            {"role": "assistant", "content": "x", "reasoning_content": "y"},
            {"role": "assistant", "content": "x", "reasoning_content": "y"},
        ),
    ],
)
def test_messages(message: dict[str, Any], plain: dict[str, Any]) -> None:
    assert list(chat_of([Message.model_validate(message)], None).messages) == [plain]


def test_what_the_template_is_told() -> None:
    chat = chat_of([Message(role="user", content="x")], {"thinking": True}, False)
    assert (chat.variables, chat.add_generation_prompt) == ({"thinking": True}, False)
    assert chat_of([Message(role="user", content="x")], None).add_generation_prompt
    with pytest.raises(ApiError) as refused:
        chat_of([Message(role="user", content="x")], {"messages": []})
    assert refused.value.param == "chat_template_kwargs"
