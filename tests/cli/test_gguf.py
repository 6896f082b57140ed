"""GGUF files where commands take checkpoints: the bundles they make, and every bad one refused in one line."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Specbuild
from tiny_gguf import write_gguf

from specbuild.runtime import Bundle, Engine

SMALL = ("--max-seq-len", 64, "--max-batch-size", 1, "--no-tune")
TEXT = [5, 300, 17, 2000, 4, 99]


@pytest.fixture(scope="module")
def plain(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose rows are whole blocks of 32."""
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "tiny", num_hidden_layers=1, intermediate_size=64)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def logits(bundle: Path) -> np.ndarray:
    with Engine.load(bundle, prefix_caching=False) as engine:
        return np.asarray(engine.text_logits(TEXT))


@pytest.mark.soak(only=("F32",))
@pytest.mark.nightly
@pytest.mark.usefixtures("quick_export")
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_bundle_of_a_gguf_is_that_of_its_weights(
    specbuild: Specbuild, plain: Path, kind: str, tmp_path: Path, temporary: Path
) -> None:
    from specbuild.builder.frontend.checkpoint import find, load

    path, built = write_gguf(plain, tmp_path / "model.gguf", kind), tmp_path / "a.bundle"
    outcome = specbuild("build", "--target", path, "-o", built, *SMALL)
    counts = "12 tensors F32" if kind == "F32" else "9 tensors Q8_0, 3 tensors F32"
    told = f"specbuild: target: gguf quantization: {kind} ({counts}), dequantized to float32\n"
    assert (outcome.status, outcome.err) == (0, told)
    report = json.loads((built / "report.json").read_text(encoding="utf-8"))
    assert report["sources"]["target"]["source"] == str(path)
    assert report["sources"]["target"]["gguf_quantization"] == kind
    found = find(str(path))
    assert Bundle.open(built).manifest.models["target"].source_sha256 == found.sha256()
    copy = tmp_path / "copy"
    load(found, "sdpa").save_pretrained(copy)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).write_bytes((plain / name).read_bytes())
    assert specbuild("build", "--target", copy, "-o", tmp_path / "b.bundle", *SMALL).status == 0
    np.testing.assert_array_equal(logits(built), logits(tmp_path / "b.bundle"))
    outcome = specbuild("verify", built, "--hf", path, "-n", 8)
    assert outcome.status == 0
    assert "plain decoding against Hugging Face" in outcome.out
    del found
    assert not list(temporary.iterdir())


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_export")
def test_a_gguf_drafts(specbuild: Specbuild, plain: Path, tmp_path: Path, temporary: Path) -> None:
    draft, asked = write_gguf(plain, tmp_path / "draft.gguf", "F16"), ("--target", plain, "--draft")
    outcome = specbuild("build", *asked, draft, "-o", tmp_path / "x", "--dry-run", "--json")
    models = json.loads(outcome.out)["models"]
    assert models["draft"]["gguf_quantization"] == "F16"
    assert "gguf_quantization" not in models["target"]
    outcome = specbuild("build", *asked, draft, "-o", tmp_path / "x", *SMALL, "--json")
    assert outcome.status == 0
    assert "draft: gguf quantization: F16" in outcome.err
    assert json.loads(outcome.out)["sources"]["target"] == {"source": str(plain)}
    assert not list(temporary.iterdir())


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def entries(path: Path) -> None:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 10**9) + bytes(1000))
    os.truncate(path, 1 << 40)  # sparse


# tests/builder/frontend has all that is refused.
BAD: dict[str, tuple[dict[str, Any], Callable[[Path], None] | None, str]] = {
    "family": ({"arch": "rwkv7"}, None, "rwkv7"),
    "cut": ({}, cut, "is cut off within"),
    "entries": ({}, entries, "1000000000 entries of metadata"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_gguf_is_refused(specbuild: Specbuild, plain: Path, case: str, tmp_path: Path, temporary: Path) -> None:
    changes, damage, words = BAD[case]
    path = write_gguf(plain, tmp_path / "bad.gguf", **changes)
    if damage:
        damage(path)
    for models in (("--target", path), ("--target", plain, "--draft", path)):
        before = time.monotonic()
        line = specbuild("build", *models, "-o", tmp_path / "x").refusal()
        assert words in line
        assert str(path) in line
        assert time.monotonic() - before < 10, "a lying header is not believed"
    assert not list(temporary.iterdir())
    assert not (tmp_path / "x").exists()


def test_other_commands_refuse_a_bad_gguf(
    specbuild: Specbuild, plain: Path, tiny_bundle: Path, tmp_path: Path, temporary: Path
) -> None:
    path = write_gguf(plain, tmp_path / "bad.gguf")
    cut(path)
    assert "is cut off within" in specbuild("pair", plain, path).refusal()
    assert "is cut off within" in specbuild("verify", tiny_bundle, "--hf", path, "-n", 2).refusal()
    assert "is cut off within" in specbuild("distill", path, "-o", tmp_path / "x").refusal()
    assert not list(temporary.iterdir())


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_export")
def test_pair_and_distill_take_a_gguf(specbuild: Specbuild, plain: Path, tmp_path: Path, temporary: Path) -> None:
    path = write_gguf(plain, tmp_path / "model.gguf", "Q8_0")
    small = "--sequence-length 24 --depth 2 --generate 96 --batch-size 2 --steps 2 --dtype fp32"
    outcome = specbuild("distill", path, "-o", tmp_path / "draft", *small.split())
    assert outcome.status == 0, outcome.err
    assert (tmp_path / "draft" / "tokenizer.json").is_file()
    outcome = specbuild("pair", path, tmp_path / "draft", "--num-prompts", 1, "-n", 16)
    assert outcome.status == 0, outcome.err
    assert not list(temporary.iterdir())


@pytest.mark.soak
def test_an_interrupted_build_leaves_nothing(plain: Path, tmp_path: Path, temporary: Path) -> None:
    path = write_gguf(plain, tmp_path / "model.gguf")
    command = [sys.executable, "-c", "from specbuild.cli import main; main()", "build", "--target", str(path)]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen([*command, "-o", str(tmp_path / "x")], env=environment, stderr=subprocess.PIPE) as process:
        ends = time.monotonic() + 120
        while not list(temporary.glob("specbuild-checkpoint-*/model.safetensors")) and process.poll() is None:
            assert time.monotonic() < ends
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert not list(temporary.glob("specbuild-checkpoint-*"))
    assert not (tmp_path / "x").exists()
