"""What tests of files that become checkpoints share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def tiny(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, whose rows are whole blocks of 32."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", intermediate_size=64)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"
