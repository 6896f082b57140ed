"""Quantized bundles end to end: small, near the exact one, told of in the report, and exact against themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from small_models import random_model, random_texts

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.export import export
from specbuild.builder.lower.onnxruntime import lower
from specbuild.builder.passes import clean, run_portable
from specbuild.builder.pipeline import build
from specbuild.builder.quantize.assignment import assign
from specbuild.builder.quantize.calibrate import calibrate
from specbuild.builder.quantize.linears import Names
from specbuild.builder.quantize.rewrite import Quantize
from specbuild.measure.divergence import kl
from specbuild.measure.exactness import compare, plain
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.errors import ExecutionError

CAPACITY = 40


def quantized(model: Any, precision: str = "int8") -> ir.Model:
    graph = export(model, probe(model.config, CAPACITY), CAPACITY, CAPACITY)
    run_portable(graph)
    names = Names.of(model)
    schemes = assign(QuantizeOptions(), "target", precision, "onnxruntime", names)
    found = calibrate(model, schemes, random_texts())
    if names.tied:
        found[names.embedding] = found[str(names.head)]
    Quantize(found, names)(graph)
    clean(graph)
    return graph


@pytest.mark.nightly
def test_a_tied_weights_lookup_and_product_read_the_same_bytes(tmp_path: Path) -> None:
    graph = quantized(random_model("llama", num_hidden_layers=1, tie_word_embeddings=True))
    large = [v for v in graph.graph.initializers.values() if v.const_value is not None and v.const_value.nbytes > 1000]
    stored = ir.external_data.convert_tensors_to_external([v.const_value for v in large], tmp_path, "weights.bin")
    for value, tensor in zip(large, stored, strict=True):
        value.const_value = tensor
    lowered = lower(graph, 1, CAPACITY)
    offsets = {
        v.name: v.const_value.offset
        for v in lowered.graph.initializers.values()
        if isinstance(v.const_value, ir.ExternalTensor)
    }
    rows = [name for name in offsets if str(name).endswith("_codes_rows")]
    assert len(rows) == 1
    assert offsets[rows[0]] == offsets[str(rows[0]).removesuffix("_rows")]


@pytest.fixture(scope="module")
def int8_bundle(pair: Path, tmp_path_factory: pytest.TempPathFactory, build_shared: Callable[..., object]) -> Path:
    path = tmp_path_factory.mktemp("int8") / "int8.bundle"
    options = QuantizeOptions(calib_size=8)
    models = {"target": str(pair / "target"), "draft": str(pair / "draft")}
    build_shared(**models, output=path, precision="int8", quantize=options)
    return path


def size(bundle: Path) -> int:
    return sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())


def report(bundle: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.nightly
def test_a_small_bundle_near_the_large_one(int8_bundle: Path, bundle: Path, prompts: list[str]) -> None:
    assert size(int8_bundle) <= 0.35 * size(bundle)
    assert report(int8_bundle)["exactness"]["kl_nats_per_token"] < 2e-3
    rows = []
    with Engine.load(int8_bundle) as small, Engine.load(bundle) as large:
        for prompt in prompts[:12]:
            tokens = small.tokenizer.encode(prompt)[:200]
            rows.append(kl(large.text_logits(tokens), small.text_logits(tokens)))
    assert 0 < np.concatenate(rows).mean() < 2e-3


@pytest.mark.nightly
def test_the_report_tells_what_it_cost(int8_bundle: Path) -> None:
    quality = report(int8_bundle)["quality"]
    assert quality["texts"]["source"] == "ours"
    for name in ("target", "draft"):
        told = quality["models"][name]
        assert 0 < told["kl_nats_per_token"] < 5e-3
        assert told["logit_cosine"] > 0.99
        assert told["perplexity"][1] == pytest.approx(told["perplexity"][0], rel=0.02)
        assert 0.24 < told["weight_bytes"] / told["weight_bytes_before"] < 0.3
        assert told["not_quantized"] == []
        assert set(told["steps"]) == {"quantized", "float32"}
        assert all(cost["kl"] < 5e-3 and cost["cosine"] > 0.99 for cost in told["layers"])
        assert len(told["layers"]) >= 4
    assert min(quality["models"]["draft"]["acceptance_length"]) > 1
    assert "acceptance_length" not in quality["models"]["target"]


@pytest.mark.nightly
@pytest.mark.parametrize("batch_size", [1, 4])
def test_speculation_is_plain_decoding(int8_bundle: Path, prompts: list[str], batch_size: int) -> None:
    with Engine.load(int8_bundle, batch_size=batch_size) as engine:
        tokens = [engine.tokenizer.encode(prompt) for prompt in prompts[:12]]
        for params in (
            SamplingParams(max_new_tokens=24, seed=0),
            SamplingParams(max_new_tokens=24, seed=0, temperature=1.0),
        ):
            expected = plain(engine, tokens, [params] * len(tokens))
            for tree in ("chain:4", "topk:4,4"):
                case = compare(engine, tree, tokens, [replace(params, speculation=tree)] * len(tokens), expected)
                assert case.exact, case


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_export")
def test_the_draft_alone(make_sharp_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """An INT8 draft changes no token, only how many are accepted."""
    model = str(make_sharp_checkpoint(tmp_path / "model", num_hidden_layers=1))
    options = QuantizeOptions(calib_size=4)
    build(BuildConfig(model, tmp_path / "b", draft=model, draft_precision="int8", max_batch_size=1, quantize=options))
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["precision"], manifest["exactness_bound"]) == ("fp32", 1e-4)
    assert {name: model["precision"] for name, model in manifest["models"].items()} == {
        "target": "fp32",
        "draft": "int8",
    }
    with Engine.load(tmp_path / "b", drafter="model") as engine:
        prompt = engine.tokenizer.encode("def main(argv):\n    ")
        params = SamplingParams(max_new_tokens=32, seed=0)
        case = compare(engine, "int8 draft", [prompt], [params], plain(engine, [prompt], [params]))
    assert case.exact
    assert case.mean_acceptance_length > 1.5


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_export")
def test_the_targets_own_weights_in_int4_are_its_draft(
    make_sharp_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = str(make_sharp_checkpoint(tmp_path / "model", num_hidden_layers=1))
    options = QuantizeOptions(calib_size=4, calibration_cache=tmp_path / "cache")
    build(BuildConfig(model, tmp_path / "b", draft="self:int4", max_batch_size=1, quantize=options))
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["models"]["draft"]["precision"] == "int4"
    assert manifest["models"]["draft"]["source_sha256"] == manifest["models"]["target"]["source_sha256"]
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 1
    assert report(tmp_path / "b")["quality"]["models"]["draft"]["acceptance_length"][1] > 1.5


@pytest.mark.nightly
def test_more_than_was_allowed_is_refused(make_sharp_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = str(make_sharp_checkpoint(tmp_path / "model", num_hidden_layers=1))
    options = QuantizeOptions(calib_size=4, max_kl=1e-9)
    with pytest.raises(
        ExecutionError, match=r"^int8 moves the target by \S+ nats .* nothing was written, use --precision fp32"
    ):
        build(BuildConfig(model, tmp_path / "b", precision="int8", max_batch_size=1, quantize=options))
    assert not (tmp_path / "b").exists()
