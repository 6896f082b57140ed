"""What tests of files that become checkpoints share."""

import pytest


@pytest.fixture(scope="module")
def tiny(make_checkpoint, tmp_path_factory):
    """Two layers, whose rows are whole blocks of 32."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", intermediate_size=64)
