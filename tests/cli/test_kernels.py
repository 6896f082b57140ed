"""Kernels in a bundle: built, shown, checked like every other file, and refused in seconds."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from specbuild.builder.codegen import nvrtc
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.pipeline import build, stages
from specbuild.runtime import Bundle
from specbuild.runtime.errors import OptionError

needs_nvrtc = pytest.mark.skipif(
    not any(metadata.distributions(name="nvidia-cuda-nvrtc")), reason="nvidia-cuda-nvrtc is not installed"
)
ATTENTION = "kernels/sm_90/attention_{}_d{}.cubin"


@pytest.fixture(scope="module")
def wide(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose head size has one kernel."""
    fields = {"head_dim": 256, "num_attention_heads": 1, "num_key_value_heads": 1}
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "wide", num_hidden_layers=1, **fields)


@pytest.fixture(scope="module")
def built(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with some of the kernels; read it, do not change it."""
    announced: list[str] = []
    config = BuildConfig(
        str(wide), tmp_path_factory.mktemp("bundles") / "b", max_seq_len=40, max_batch_size=1, cuda_arch=("90,80",)
    )
    with pytest.MonkeyPatch.context() as patch:
        files = [nvrtc.PLUGINS / "kernels" / name for name in ("attention.cu", "walk.cu")]
        patch.setattr(nvrtc, "sources", lambda names=(): files)
        build(config, announced.append)
    assert len(announced) == stages(config)
    assert (announced[0], announced[2]) == ("checkpoints", "kernels")
    assert announced[1].endswith("MiB of memory will be needed")
    return config.output


@pytest.mark.nightly
@needs_nvrtc
def test_the_manifest_lists_kernels_and_hashes(built: Path) -> None:
    manifest = Bundle.open(built).manifest
    files = {path.relative_to(built).as_posix() for path in (built / "kernels").rglob("*.cubin")}
    assert files == set(manifest.kernels) <= set(manifest.files)
    attention = manifest.kernels[ATTENTION.format("BF16_BF16", 256)]
    assert attention.architecture == "90"
    assert "tree_attention_BF16_BF16_d256_r32" in attention.kernels
    report = json.loads((built / "report.json").read_text(encoding="utf-8"))["kernels"]
    for name in ("80", "90"):
        records = [record for record in manifest.kernels.values() if record.architecture == name]
        assert {kernel for record in records for kernel in record.kernels} == set(report["architectures"][f"sm_{name}"])
    assert report["compiler"] == f"NVRTC {nvrtc.compiler_version()}"


def test_a_missing_compiler_is_told_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(OptionError, match="needs NVRTC"):
        build(BuildConfig(str(tmp_path / "none"), tmp_path / "b", cuda_arch=("80",)))
