"""A shape travels without weights, which are made from a seed where it runs; the hashes are of what is there."""

import json
import shutil

import numpy as np
import pytest

from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.errors import BundleError

pytestmark = pytest.mark.slow
SIZES = {"num_hidden_layers": 2, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def scripts(import_script):
    return import_script("gpu/make_shape"), import_script("gpu/make_weights")


@pytest.fixture(scope="module", params=[pytest.param(True, marks=pytest.mark.nightly), False], ids=["tied", "untied"])
def shape(request, scripts, make_checkpoint, tmp_path_factory):
    """A toy's shape, and whether its head is its embedding."""
    folder = tmp_path_factory.mktemp("shape")
    toy = make_checkpoint(folder / "toy", tie_word_embeddings=request.param, **SIZES)
    out = folder / "shape.bundle"
    arguments = [str(out), "--like", str(toy / "config.json"), "--max-seq-len", "64", "--max-batch-size", "2"]
    assert scripts[0].main(arguments) == 0
    return out, request.param


@pytest.fixture
def copy(shape, tmp_path):
    return shutil.copytree(shape[0], tmp_path / "copy.bundle")


def weights_of(folder):
    """Every weight by name, as numbers."""
    listed = json.loads((folder / "target" / "parts.json").read_text())["weights"]
    data = (folder / "target" / "weights.bin").read_bytes()
    return {
        name: np.frombuffer(data, each["dtype"], int(np.prod(each["shape"])), each["offset"]).reshape(each["shape"])
        for name, each in listed.items()
    }


def test_a_shape_has_all_but_weights(shape):
    folder, _ = shape
    bundle = Bundle.open(folder)
    bundle.verify()
    assert not list(folder.rglob("weights.bin"))
    assert bundle.manifest.models["target"].source == "the shape of toy"
    assert sum(path.stat().st_size for path in folder.rglob("*.onnx")) < 20_000


def test_the_hash_is_of_the_weights_that_were_made(scripts, copy):
    manifest = scripts[1].make(copy, 7)
    assert Bundle.open(copy).manifest == manifest
    Bundle.open(copy).verify()
    assert manifest.models["target"].source == "the shape of toy, weights drawn by seed 7"
    with (copy / "target" / "weights.bin").open("r+b") as file:
        file.write(b"x")
    with pytest.raises(BundleError, match="hash differs"):
        Bundle.open(copy).verify()


def test_a_seed_gives_the_same_weights_and_another_others(scripts, shape, tmp_path):
    made = []
    for at, seed in enumerate((1, 1, 2)):
        folder = shutil.copytree(shape[0], tmp_path / f"{at}.bundle")
        made.append(scripts[1].make(folder, seed).files["target/weights.bin"].sha256)
    assert made[0] == made[1] != made[2]


def test_weights_are_spread_like_a_model_s(scripts, shape, copy):
    """Products shrink with their inputs; a text goes on with its last token, or the next one."""
    scripts[1].make(copy, 0)
    weights, tied = weights_of(copy), shape[1]
    for name, each in weights.items():
        assert np.isfinite(each.astype(np.float32)).all()
        if "proj" in name:
            assert 0.6 < each.astype(np.float32).std() * each.shape[0] ** 0.5 < 0.8, name
        elif "norm" in name:
            assert (each == 1).all()
    cos, sin = (next(each for name, each in weights.items() if f".{what}" in name) for what in ("cos", "sin"))
    np.testing.assert_allclose(cos**2 + sin**2, 1, rtol=1e-6)
    np.testing.assert_allclose(np.arctan2(sin[1], cos[1])[[0, -1]], [1, 10_000 ** (1 / len(cos[0]) - 1)], rtol=1e-5)
    if tied:
        assert "model.embed_tokens.weight" not in weights or "lm_head.weight" not in weights
    else:
        head = weights["lm_head.weight.T"].T
        np.testing.assert_array_equal(head[1:], weights["model.embed_tokens.weight"][:-1])


def test_what_cannot_be_made_is_refused_in_a_line(scripts, copy, bundle, tmp_path, capsys):
    assert scripts[1].main([str(copy)]) == 0
    for given, words in ((copy, "is there: only a bundle without weights"), (bundle, "no models in parts")):
        capsys.readouterr()
        assert scripts[1].main([str(given)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    assert scripts[0].main([str(tmp_path / "out"), "--like", "no-such-shape"]) == 2
    assert "use llama-3.1-8b, qwen2.5-coder-1.5b, smollm2-135m, or a config.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
