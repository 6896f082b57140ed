"""Fields of a response's request: exact types, nothing unknown in silence."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specbuild.serve.agents.fields import SAMPLING, ResponsesRequest
from specbuild.serve.body import unknown
from specbuild.serve.fields import ChatRequest


def test_sampling_is_a_chats() -> None:
    assert set(SAMPLING) <= ChatRequest.model_fields.keys() & ResponsesRequest.model_fields.keys()


@pytest.mark.parametrize(
    "fields", [{"input": []}, {"include": ["x"]}, {"truncation": "auto"}, {"tools": [{"type": "web_search"}]}]
)
def test_what_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ResponsesRequest.model_validate({"input": "x"} | fields)


def test_unknown_fields_are_named() -> None:
    assert list(unknown(ResponsesRequest.model_validate({"input": [{"role": "user", "mood": 1}]}))) == ["input.0.mood"]
