"""`specbuild build`: what it prints, and every input it refuses in one line, leaving nothing."""

import json
import os
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from campaign.signals import small

from specbuild.runtime import Bundle

USAGE = namedtuple("usage", "total used free")


@pytest.fixture
def place(tmp_path):
    """The output's parent."""
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


@pytest.fixture
def checkpoint(tiny, tmp_path):
    """A checkpoint to damage."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def snapshot(folder):
    """Everything in a folder, hidden or not."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def weights(change):
    """A damage done to the tensors."""

    def damage(folder):
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def config(**fields):
    return lambda folder: edit(folder / "config.json", **fields)


def removed(name):
    return lambda folder: (folder / name).unlink()


def cut(name, share):
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def pickled(folder):
    import torch

    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def set_nan(tensors):
    tensors["model.layers.0.self_attn.q_proj.weight"][1, 2] = float("nan")


def fewer_tokens(folder):
    def halve(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:2048].clone()

    weights(halve)(folder)
    config(vocab_size=2048)(folder)


def encoder_decoder(folder):
    from transformers import T5Config, T5ForConditionalGeneration

    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (folder / name).unlink()
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=4096, **sizes)).save_pretrained(folder)


# tests/attacks has broken JSON and headers, tests/builder/frontend what attention and weights cannot be.
BAD_CHECKPOINTS = {
    "missing folder": (shutil.rmtree, ["does not exist"]),
    "empty folder": (emptied, ["is empty"]),
    "no config.json": (removed("config.json"), ["config.json"]),
    "no model type": (config(model_type=None), ["config.json", "model type"]),
    "unknown activation": (config(hidden_act="wobble"), ["wobble"]),
    "unknown rope type": (config(rope_parameters={"rope_type": "coil", "rope_theta": 1e4}), ["coil"]),
    "unknown architecture": (config(model_type="nonesuch"), ["nonesuch"]),
    "truncated weights": (cut("model.safetensors", 0.9999), ["model.safetensors", "download"]),
    "missing weight": (weights(lambda tensors: tensors.pop("model.norm.weight")), ["missing", "model.norm.weight"]),
    "weights of another vocabulary": (config(vocab_size=4097), ["config.json", "vocab_size", "4096"]),
    "more tokens than rows": (fewer_tokens, ["2048", "4096"]),
    "no weights": (removed("model.safetensors"), ["model.safetensors"]),
    "pickled weights only": (pickled, ["safetensors"]),
    "no tokenizer": (removed("tokenizer.json"), ["tokenizer.json"]),
    "broken tokenizer": (cut("tokenizer.json", 0.3), ["tokenizer"]),
    "encoder-decoder": (encoder_decoder, ["t5", "decoder-only"]),
    "images too": (config(model_type="gemma3"), ["'gemma3'", "language model alone"]),
    "looks ahead": (config(is_causal=False), ["looks ahead"]),
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_a_bad_checkpoint_is_refused(specbuild, checkpoint, place, name):
    damage, words = BAD_CHECKPOINTS[name]
    damage(checkpoint)
    line = specbuild("build", "--target", checkpoint, "-o", place / "b").refusal()
    assert [word for word in words if word not in line] == [], line
    assert snapshot(place) == {}


@pytest.mark.slow
def test_what_is_at_the_output_stays_unless_a_build_succeeds(specbuild, tiny, tiny_bundle, checkpoint, place):
    shutil.copytree(tiny_bundle, place / "b")
    (place / "mine").mkdir()
    (place / "mine" / "thesis.tex").write_text("mine")
    before = snapshot(place)
    weights(set_nan)(checkpoint)
    for target, output, force, words in (
        (tiny, "b", (), "exists"),
        (tiny, "mine", ("--force",), "not a bundle"),
        (checkpoint, "b", ("--force",), "NaN"),
    ):
        assert words in specbuild("build", "--target", target, "-o", place / output, *force).refusal()
        assert snapshot(place) == before


def test_too_little_space_is_known_before(specbuild, tiny, place, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: USAGE(1 << 30, 1 << 30, 1 << 20))
    assert "free" in specbuild("build", "--target", tiny, "-o", place / "new" / "b").refusal()
    assert snapshot(place) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_export")
def test_a_full_disk(specbuild, tiny, place, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: USAGE(1 << 40, 0, 1 << 40))
    with small(place / "disk", 1) as disk:
        if not disk.is_mount():
            pytest.skip("this machine lets us mount no tmpfs")
        line = specbuild("build", "--target", tiny, "-o", disk / "b", "--max-batch-size", 1).refusal()
        assert f"{disk / 'b'}" in line
        assert "full" in line
        assert snapshot(disk) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_export")
def test_the_summary(specbuild, tiny, tiny_bundle, place, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    shutil.copytree(tiny_bundle, place / "b")
    sizes = "--max-seq-len", 64, "--max-batch-size", 1
    outcome = specbuild("build", "--target", tiny, "-o", place / "b", *sizes, "--force")
    assert (outcome.status, outcome.err) == (0, "")
    assert str(place / "b") in outcome.out
    assert "tokens equal" in outcome.out
    tuned = json.loads((place / "b" / "report.json").read_text(encoding="utf-8"))["tuning"]
    shown = f"auto {tuned['auto']:.2f}× plain decoding, measured; there is no draft, lookup alone is tuned"
    for out in (outcome.out, specbuild("inspect", place / "b").out):
        assert shown in out
    assert [path.name for path in place.iterdir()] == ["b"]


def test_the_summary_of_engines_that_did_not_run(specbuild, tiny, bundle, place, monkeypatch):
    from specbuild.builder import pipeline

    report = json.loads((bundle / "report.json").read_text(encoding="utf-8")) | {
        "sources": {
            "target": {"gguf_quantization": "Q4_K", "gguf_tensors": {"Q4_K": 7, "F32": 2}},
            "draft": {"packed_quantization": "gptq", "packed_weights": 5},
        },
        "kept": {"target": {"bits_per_weight": 4.5}},
        "kernels": {"compiler": "NVRTC 13.1", "architectures": {"sm_90": {"attention": 1}}},
        "engines": {"target": {"layers": [], "layer_types": {}, "model_layers": []}},
        "exactness": {"cases": [], "graph_logit_difference": 2e-5, "not_run": "there is no GPU"},
        "fp8_caches": {"kl_nats_per_token": 1e-3, "largest_kl_nats": 0.02},
    }
    monkeypatch.setattr(pipeline, "build", lambda *_: report)
    options = "--backend", "tensorrt-rtx", "--arch", "89", "--cuda-arch", "none"
    told = specbuild("build", "--target", tiny, "-o", place / "b", *options)
    assert "target: gguf quantization: Q4_K (7 tensors Q4_K, 2 tensors F32), kept, 4.5 bits a weight" in told.err
    assert "draft: gptq, 5 weights dequantized to float32" in told.err
    for words in (
        "kernels: 1 for sm_90, by NVRTC 13.1",
        "target engine: 0 layers",
        "on this CPU, to Hugging Face: largest difference 2.0e-05",
        "FP8 caches alone, in float32: 1.0e-03 nats a token to Hugging Face, 2.0e-02 at most",
        "not run here, and so not checked: there is no GPU",
        "no kernels for sm_89",
    ):
        assert words in told.out


@pytest.fixture
def compiled(monkeypatch):
    """TensorRT has compiled, as on a machine with a GPU."""
    from specbuild.builder import pipeline
    from specbuild.builder.codegen import emit
    from specbuild.builder.codegen.tensorrt import Engine

    monkeypatch.setattr(pipeline, "check_machine", lambda *_: None)
    monkeypatch.setattr(pipeline, "unrunnable", lambda *_: "no GPU here")
    monkeypatch.setattr(emit, "built_on", lambda backend: ("89",))
    monkeypatch.setattr(emit, "compile_engine", lambda *_: Engine(b"plan", "10.15", []))


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_export", "compiled")
def test_fp8_caches_in_pages(specbuild, make_checkpoint, tmp_path, monkeypatch):
    """From a recipe: in the profiles, the manifest, the report, the memory, the bound, and in words."""
    monkeypatch.setenv("COLUMNS", "300")
    for name, count in (("target", 2), ("draft", 1)):
        make_checkpoint(tmp_path / name, num_hidden_layers=count, head_dim=64, initializer_range=0.3)
    recipe = 'target = "target"\ndraft = "draft"\nbackend = "tensorrt"\nkv-cache-dtype = "fp8"\nblock-size = 16\n'
    (tmp_path / "r.toml").write_text(recipe)
    options = ["--recipe", tmp_path / "r.toml", "--max-seq-len", 64, "--max-batch-size", 2, "--cuda-arch", "none"]
    plan = json.loads(specbuild("build", *options, "-o", tmp_path / "x", "--dry-run", "--json").out)
    assert {tuple(sizes["pages"]) for sizes in plan["profiles"].values()} == {(1, 17, 17)}
    fp8 = specbuild("build", *options, "-o", tmp_path / "fp8")
    assert re.search(r"  FP8 caches alone, in float32: \S+ nats a token to Hugging Face, \S+ at most\n", fp8.out)
    own = specbuild("build", *options, "-o", tmp_path / "own", "--kv-cache-dtype", "auto", "--block-size", 0)
    assert "FP8" not in own.out
    manifests = [Bundle.open(tmp_path / name).manifest for name in ("fp8", "own")]
    kinds = [{(e.kv_cache_dtype, e.block_size) for e in manifest.engines.values()} for manifest in manifests]
    assert kinds == [{("fp8", 16)}, {("auto", 0)}]
    assert manifests[0].exactness_bound > 1.5 * manifests[1].exactness_bound
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("fp8", "own")]
    paged, linear = (report["memory"]["caches_per_sequence"] for report in reports)
    assert 1 <= 2 * paged / linear < 1.2, "half the bytes of a row, and room in the last pages"
    assert reports[0]["fp8_caches"]["kl_nats_per_token"] > 0
    shown = specbuild("inspect", tmp_path / "fp8").out
    assert "TensorRT 10.15, sm_89, plugin attention over fp8 caches, in pages of 16 rows" in shown


def test_a_recipes_values_have_their_flags_types(specbuild, tiny, tmp_path):
    for line, message in (
        ("max-batch-size = [4]", "has a list for 'max-batch-size'"),
        ("max-batch-size = 2.7", "'2.7' is not a valid integer"),
        ("max-batch-size = true", "'true' is not a valid integer"),
        ("weight-streaming = 2", "'2' is not a valid boolean"),
        ("buckets = [1, 2.9]", "buckets must be whole numbers"),
    ):
        (tmp_path / "r.toml").write_text(line)
        options = ("--recipe", tmp_path / "r.toml", "--target", tiny, "-o", tmp_path / "x", "--dry-run")
        assert message in specbuild("build", *options).refusal()
