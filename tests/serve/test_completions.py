"""Completions: prompts of four kinds, and what is refused of OpenAI's."""

from __future__ import annotations

from typing import Any

import pytest

from specbuild.serve.completions import prompts_of
from specbuild.serve.errors import ApiError
from specbuild.serve.fields import CompletionRequest


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("x", ["x"]), ([1, 2], [[1, 2]]), (["x", "y"], ["x", "y"]), ([[1], [2]], [[1], [2]]), ([], [[]])],
)
def test_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert prompts_of(CompletionRequest(prompt=prompt)) == prompts


@pytest.mark.parametrize("fields", [{"suffix": ""}, {"best_of": 2}, {"best_of": 3, "n": 2}])
def test_what_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="not supported"):
        prompts_of(CompletionRequest(prompt="x", **fields))
    assert prompts_of(CompletionRequest(prompt="x", best_of=2, n=2)) == ["x"]
