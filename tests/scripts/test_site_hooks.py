"""Links of the site's pages: those to pages stay, those to other files of the repository become paths."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "scripts" / "site_hooks.py"
PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="guides/serving.md"))


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](cost.md)", "[a](cost.md)"),
        ("[a](../internals/policy.md#a-batch)", "[a](../internals/policy.md#a-batch)"),
        ("[result](../../benchmarks/results/x.json)", "result (`benchmarks/results/x.json`)"),
        ("[README](../../README.md#serve) and [b](../../deploy)", "README (`README.md`) and b (`deploy`)"),
        ("[README.md](../../README.md)", "`README.md`"),
        ("[a](https://example.com/../x)", "[a](https://example.com/../x)"),
    ],
)
def test_links(hooks: Any, text: str, expected: str) -> None:
    assert hooks.on_page_markdown(text, PAGE) == expected
