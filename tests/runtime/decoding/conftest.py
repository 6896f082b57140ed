"""The folder of the tiny models' graphs, which all loops share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `tiny_models.executor` saves a model's graph, and finds it again."""
    return tmp_path_factory.mktemp("models")
