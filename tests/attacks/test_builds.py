"""Builds whose checkpoint, output or memory is taken away under them: one line, and nothing is lost or left behind."""

import pytest
from data_files import snapshot

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.pipeline import build
from specbuild.runtime.errors import CheckpointError, OutputError


@pytest.fixture
def target(make_checkpoint, tmp_path):
    return make_checkpoint(tmp_path / "target", num_hidden_layers=1)


def overwrite(target):
    path = target / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def shorten(target):
    """By another file of that name: one that is cut in place while it is mapped ends the process."""
    short = target / "short"
    short.write_bytes((target / "model.safetensors").read_bytes()[:1000])
    short.replace(target / "model.safetensors")


def remove(target):
    (target / "model.safetensors").unlink()


@pytest.mark.slow
@pytest.mark.nightly(but=("checkpoints-overwrite", "checkpoints-shorten", "checkpoints-remove"))
@pytest.mark.usefixtures("quick_export")
@pytest.mark.parametrize("change", [overwrite, shorten, remove])
@pytest.mark.parametrize("stage", ["checkpoints", "target: export"])
def test_weights_that_change_while_they_are_built(target, tmp_path, stage, change):
    """After the look at them and before they are loaded, or after that and before they are hashed."""
    told = []

    def progress(name):
        told.append(name)
        if (name == stage and stage != "checkpoints") or (stage == "checkpoints" and name == "target: load"):
            change(target)

    with pytest.raises(CheckpointError) as caught:
        build(BuildConfig(str(target), tmp_path / "out" / "b", max_batch_size=1), progress)
    assert "\n" not in str(caught.value)
    assert "model.safetensors" in str(caught.value) or "does not load" in str(caught.value)
    assert "check" not in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_is_the_target_is_refused(target, force):
    before = snapshot(target)
    with pytest.raises(OutputError):
        build(BuildConfig(str(target), target, draft=str(target), force=force))
    assert snapshot(target) == before
