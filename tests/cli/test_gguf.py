"""GGUF files where commands take checkpoints: the bundles they make, and every bad one refused in one line."""

import json
import os
import struct
import time

import pytest
from tiny_gguf import write_gguf

pytestmark = pytest.mark.usefixtures("temporary")
SMALL = ("--max-seq-len", 64, "--max-batch-size", 1, "--no-tune")


@pytest.fixture(scope="module")
def plain(make_checkpoint, tmp_path_factory):
    """A checkpoint whose rows are whole blocks of 32."""
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "tiny", num_hidden_layers=1, intermediate_size=64)


def test_a_gguf_drafts(specbuild, plain, tmp_path, temporary):
    draft = write_gguf(plain, tmp_path / "draft.gguf", "F16")
    asked = "--target", plain, "--draft", draft, "-o", tmp_path / "x"
    models = json.loads(specbuild("build", *asked, "--dry-run", "--json").out)["models"]
    assert models["draft"]["gguf_quantization"] == "F16"
    assert "gguf_quantization" not in models["target"]
    assert not list(temporary.iterdir())


def cut(path):
    os.truncate(path, path.stat().st_size - 1000)


def entries(path):
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 10**9) + bytes(1000))
    os.truncate(path, 1 << 40)  # sparse


# tests/builder/frontend has all that is refused.
BAD = {
    "family": ({"arch": "rwkv7"}, None, "rwkv7"),
    "cut": ({}, cut, "is cut off within"),
    "entries": ({}, entries, "1000000000 entries of metadata"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_gguf_is_refused(specbuild, plain, case, tmp_path, temporary):
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


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_export")
def test_a_bundle_of_a_gguf(specbuild, plain, tmp_path, temporary):
    path, built = write_gguf(plain, tmp_path / "model.gguf", "Q8_0"), tmp_path / "a.bundle"
    outcome = specbuild("build", "--target", path, "-o", built, "--precision", "fp32", *SMALL, "--json")
    counts = "9 tensors Q8_0, 3 tensors F32"
    told = f"specbuild: target: gguf quantization: Q8_0 ({counts}), dequantized to float32\n"
    assert (outcome.status, outcome.err) == (0, told)
    source = json.loads(outcome.out)["sources"]["target"]
    assert (source["source"], source["gguf_quantization"]) == (str(path), "Q8_0")
    outcome = specbuild("verify", built, "--hf", path, "-n", 8)
    assert outcome.status == 0
    assert "plain decoding against Hugging Face" in outcome.out
    assert not list(temporary.iterdir())
