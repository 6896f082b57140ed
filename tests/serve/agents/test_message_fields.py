"""Fields of /v1/messages: what is no such thing is named."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specbuild.serve.agents.message_fields import SAMPLING, MessagesRequest
from specbuild.serve.fields import ChatRequest

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def test_shared_fields_are_a_chats() -> None:
    assert set(SAMPLING) <= MessagesRequest.model_fields.keys() & ChatRequest.model_fields.keys()


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "no"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "input_schema": {}}]}, "tools"),
    ],
)
def test_what_is_not_read_is_refused(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError) as refused:
        MessagesRequest.model_validate(ASKED | fields)
    assert refused.value.errors()[0]["loc"][0] == where
