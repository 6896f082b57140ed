"""What tests of files that become checkpoints share."""

import tempfile

import pytest


@pytest.fixture(scope="module")
def tiny(make_checkpoint, tmp_path_factory):
    """Two layers, whose rows are whole blocks of 32."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", intermediate_size=64)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where temporary folders are made, empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"
