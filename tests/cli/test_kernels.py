"""Kernels in a bundle: built, shown, checked like every other file, and refused in seconds."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from specbuild.builder.codegen import nvrtc
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.pipeline import build, stages
from specbuild.builder.targets import ARCHITECTURES
from specbuild.cli import doctor
from specbuild.runtime import Bundle
from specbuild.runtime.bundle.manifest import MANIFEST, KernelRecord
from specbuild.runtime.errors import BundleError, CheckpointError, OptionError

Command = Callable[..., Any]
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


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    """The bundle, to damage."""
    return Path(shutil.copytree(built, tmp_path / "copy"))


@pytest.mark.slow
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


@pytest.mark.slow
@needs_nvrtc
def test_inspect_shows_them(specbuild: Command, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    manifest = Bundle.open(built).manifest
    lines = [line.split(maxsplit=1) for line in specbuild("inspect", built).out.splitlines()]
    shown = [text.strip() for name, text in lines if name == "kernels"]
    for name, line in zip(("90", "80"), shown, strict=True):  # as they were asked for
        records = {file: record for file, record in manifest.kernels.items() if record.architecture == name}
        size = sum(manifest.files[file].bytes for file in records)
        count = sum(len(record.kernels) for record in records.values())
        assert line == f"sm_{name}: {count} kernels in {len(records)} cubins, {size / 1e6:.1f} MB"


@pytest.mark.slow
@needs_nvrtc
def test_a_changed_cubin_is_refused(specbuild: Command, copy: Path) -> None:
    path = copy / ATTENTION.format("BF16_BF16", 256)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert f"{path} is not what was built" in specbuild("inspect", copy).refusal()
    assert f"{path} is not what was built" in specbuild("generate", copy, "-p", "x", "-n", "1").refusal()


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ({"../x.cubin": KernelRecord("80", [])}, "leaves the bundle"),
        ({"x.cubin": KernelRecord("80", [])}, "does not list its hash"),
        ({"x.cubin": KernelRecord(80, [])}, "malformed"),
        ({"x.cubin": KernelRecord("80", 5)}, "malformed"),
        ({"x.cubin": KernelRecord("80", [5])}, "malformed"),
    ],
)
def test_a_manifest_that_lies_about_kernels(copy: Path, kernel: dict[str, KernelRecord], words: str) -> None:
    manifest = dataclasses.replace(Bundle.open(copy).manifest, kernels=kernel)
    (copy / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    with pytest.raises(BundleError, match=words):
        Bundle.open(copy)


def test_a_bundle_without_kernels_says_nothing_of_them(specbuild: Command, tiny_bundle: Path) -> None:
    assert "kernels" not in json.loads((tiny_bundle / MANIFEST).read_text(encoding="utf-8"))
    assert Bundle.open(tiny_bundle).manifest.kernels == {}
    assert "kernels" not in specbuild("inspect", tiny_bundle).out
    assert json.loads((tiny_bundle / "report.json").read_text(encoding="utf-8"))["kernels"] is None


@pytest.mark.parametrize("arguments", [["75"], ["80,75"], ["80", "--cuda-arch", "75"]])
def test_an_architecture_that_is_not_supported(
    specbuild: Command, tiny: Path, tmp_path: Path, arguments: list[str]
) -> None:
    line = specbuild("build", "--target", tiny, "-o", tmp_path / "b", "--cuda-arch", *arguments).refusal()
    assert "sm_75 is not supported: use 80, 86, 87, 89, 90, 100, 110, 120, 121, or all" in line
    assert list(tmp_path.iterdir()) == []


@needs_nvrtc
def test_a_head_size_without_kernels(specbuild: Command, wide: Path, tiny: Path, tmp_path: Path) -> None:
    for name, models in (("target", [tiny]), ("draft", [wide, "--draft", tiny])):
        line = specbuild("build", "--target", *models, "-o", tmp_path / "b", "--cuda-arch", "80").refusal()
        assert f"the {name} has no kernels, head size 16: TreeAttention has 64, 80, 96, 128 and 256" in line
        assert "without --cuda-arch" in line
        assert list(tmp_path.iterdir()) == []


def test_what_is_refused_is_refused_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BuildConfig(str(tmp_path / "none"), tmp_path / "b", cuda_arch=("80",))
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: pytest.fail("no compiler is needed"))
    with pytest.raises(CheckpointError):
        build(dataclasses.replace(config, cuda_arch=()))

    def missing() -> None:
        raise OptionError("compiling kernels needs NVRTC")

    monkeypatch.setattr(nvrtc, "_nvrtc", missing)
    with pytest.raises(OptionError, match="needs NVRTC"):
        build(config)


@needs_nvrtc
def test_float16_models_get_float16_kernels(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stop(*arguments: Any) -> None:
        asked.extend(arguments)
        raise OptionError("seen")

    monkeypatch.setattr(nvrtc, "compile_kernels", stop)
    half = shutil.copytree(wide, tmp_path / "half")
    content = json.loads((half / "config.json").read_text(encoding="utf-8"))
    (half / "config.json").write_text(json.dumps(content | {"dtype": "float16"}), encoding="utf-8")
    with pytest.raises(OptionError, match="seen"):
        build(BuildConfig(str(half), tmp_path / "b", draft=str(wide), cuda_arch=("all",)))
    assert asked[:2] == [ARCHITECTURES, [nvrtc.Shape(256, "F16", "F16"), nvrtc.Shape(256, "BF16", "BF16")]]


def test_doctor_says_what_compiles_kernels(specbuild: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "find_library", lambda name="": tmp_path / "libspecbuild_kernels.so")
    monkeypatch.setattr(doctor, "_nvrtc", lambda: "13.5")
    found = json.loads(specbuild("doctor", "--json").out)
    assert (found["NVRTC"], found["kernel library"]) == ("13.5", str(tmp_path / "libspecbuild_kernels.so"))
    assert "yes, by NVRTC" in found["CUDA kernels"]
    assert "yes, by the library" in found["CUDA kernels"]


def test_doctor_says_how_to_get_them(specbuild: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OptionError("compiling kernels needs NVRTC")

    monkeypatch.setattr(nvrtc, "_nvrtc", missing)
    monkeypatch.setattr(doctor, "find_library", lambda name="": None)
    found = json.loads(specbuild("doctor", "--json").out)
    assert "pip install 'specbuild-trt[cuda]'" in found["NVRTC"]
    assert "SPECBUILD_CUDA=1 pip install ." in found["kernel library"]
    assert found["CUDA kernels"].count(": no") == 2
