"""The bundle's writer lists every file in the manifest, and puts tokenizer, chat template and kernels beside models."""

import hashlib
import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from specbuild.builder.build_context import BuildContext, Stages
from specbuild.builder.bundle_writer import (
    memory_plans,
    save_kernels,
    save_sampling,
    save_tokenizer,
    write_manifest,
)
from specbuild.builder.codegen import nvrtc
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.prepare import prepare
from specbuild.runtime import Bundle
from specbuild.runtime.bundle.manifest import FileRecord, KernelRecord
from specbuild.runtime.bundle.memory_plan import plan


@pytest.fixture
def context(pair, tmp_path):
    """`context(**BuildConfig fields)`: a build of the reference target that has written nothing yet."""

    def make(**fields):
        config = BuildConfig(str(pair / "target"), tmp_path / "b", **fields)
        (tmp_path / "b").mkdir()
        stages = Stages(lambda stage: None, lambda phase, share: None)
        return BuildContext(config, tmp_path / "b", prepare(config), stages)

    return make


def test_the_manifest_describes_the_pair(bundle, pair):
    opened = Bundle.open(bundle)
    opened.verify()
    manifest = opened.manifest
    assert (manifest.backend, manifest.precision, manifest.exactness_bound) == ("onnxruntime", "fp32", 1e-4)
    assert (manifest.max_seq_len, manifest.max_batch_size, manifest.default_tree) == (1024, 4, "best:5")
    assert manifest.eos_token_ids == [0]
    assert set(manifest.libraries) >= {"torch", "transformers", "onnx", "onnxruntime"}
    for name, shape in (("target", (6, 2, 64)), ("draft", (2, 1, 64))):
        model = manifest.models[name]
        assert (model.layers, model.kv_heads, model.head_dim) == shape
        assert (model.vocab_size, model.max_positions, model.architecture) == (4096, 1024, "LlamaForCausalLM")
        weights = hashlib.sha256((pair / name / "model.safetensors").read_bytes()).hexdigest()
        assert model.source_sha256 == hashlib.sha256(weights.encode()).hexdigest()
        assert set(model.graphs) == {"1", "2", "4"}
    there = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}
    assert there == set(manifest.files) | {"manifest.json"}


def record(content):
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def test_a_file_is_hashed_when_it_is_first_seen(bundle, tmp_path):
    """Nothing is written twice, and weights take long to read; the manifest itself is no part of the list."""
    given = replace(Bundle.open(bundle).manifest, files={})
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "weights.bin").write_bytes(b"first")
    first = write_manifest(tmp_path, given)
    assert first.files == {"target/weights.bin": record(b"first")}
    (tmp_path / "target" / "weights.bin").write_bytes(b"other")
    (tmp_path / "report.json").write_bytes(b"{}")
    second = write_manifest(tmp_path, replace(first, exactness_bound=0.5))
    assert second.files == {"target/weights.bin": record(b"first"), "report.json": record(b"{}")}
    assert (given.files, first.files) == ({}, {"target/weights.bin": record(b"first")}), "no record changes"
    written = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    assert written["files"].keys() == second.files.keys()
    assert (written["exactness_bound"], written["models"].keys()) == (0.5, given.models.keys())
    assert "kernels" not in written


def test_the_tokenizer_is_what_transformers_uses(pair, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    assert save_tokenizer(tmp_path, tokenizer) is None
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("def f(x):\n    return x", "Zwölf Boxkämpfer 日本語", "<|endoftext|>"):
        assert ours.encode(text).ids == tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{{ messages }}", "{{ messages }}"),
        ({"default": "ä", "tool_use": "b"}, "ä"),
        ({"tool_use": "b"}, None),
        ("", None),
    ],
)
def test_of_several_chat_templates_the_default_is_kept(pair, tmp_path, template, written):
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    tokenizer.chat_template = template
    assert save_tokenizer(tmp_path, tokenizer) == ("chat_template.jinja" if written else None)
    file = tmp_path / "chat_template.jinja"
    assert (file.read_text(encoding="utf-8") if file.exists() else None) == written


def test_a_checkpoints_sampling_parameters_are_kept(tmp_path):
    save_sampling(tmp_path, {})
    assert not list(tmp_path.iterdir())
    save_sampling(tmp_path, {"temperature": 0.6, "top_k": 50})
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"temperature": 0.6, "top_k": 50}


def test_memory_is_planned_by_batch_and_length(bundle):
    manifest = Bundle.open(bundle).manifest
    found = memory_plans(manifest, BuildConfig("t", Path("b"), max_batch_size=3))
    sizes = [(each["batch_size"], each["seq_len"]) for each in found["plans"]]
    assert sizes == [(batch, length) for batch in (1, 2, 3) for length in (256, 512, 1024)]
    assert found["plans"][-1] == plan(manifest, 3, 1024).to_dict()
    weights = [path.stat().st_size for name in ("target", "draft") for path in (bundle / name).iterdir()]
    assert found["weights"] == sum(weights)
    short = memory_plans(replace(manifest, max_seq_len=3), BuildConfig("t", Path("b"), max_batch_size=1))
    assert [each["seq_len"] for each in short["plans"]] == [1, 3]  # a quarter of it is none


@pytest.mark.skipif(not any(metadata.distributions(name="nvidia-cuda-nvrtc")), reason="nvidia-cuda-nvrtc is missing")
def test_each_cubin_has_its_record(context, tmp_path, monkeypatch):
    """Around other backends' graphs only what decodes is compiled; one small source stands for that here."""
    (tmp_path / "modest.cu").write_text('extern "C" __global__ void modest(float *x) { x[threadIdx.x] = 1.0f; }')
    monkeypatch.setattr(nvrtc, "sources", lambda: [tmp_path / "modest.cu"])
    work = context(backend="onnxruntime-cuda", precision="fp32", cuda_arch=("80,90",))
    kernels = save_kernels(work, [])
    names = {f"kernels/sm_{name}/modest.cubin": KernelRecord(name, ["modest"]) for name in ("80", "90")}
    assert kernels.records == names
    assert all((work.folder / name).read_bytes()[:4] == b"\x7fELF" for name in names)
    assert kernels.report is not None
    assert list(kernels.report["architectures"]) == ["sm_80", "sm_90"]
