"""Quantized bundles end to end: small, near the exact one, told of in the report, and exact against themselves."""

import json
from dataclasses import replace

import numpy as np
import pytest

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.pipeline import build
from specbuild.measure.divergence import kl
from specbuild.measure.exactness import compare, plain
from specbuild.runtime import Engine, SamplingParams


@pytest.fixture(scope="module")
def int8_bundle(pair, tmp_path_factory, build_shared):
    path = tmp_path_factory.mktemp("int8") / "int8.bundle"
    options = QuantizeOptions(calib_size=8)
    models = {"target": str(pair / "target"), "draft": str(pair / "draft")}
    build_shared(**models, output=path, precision="int8", quantize=options)
    return path


@pytest.mark.nightly
def test_a_small_bundle_near_the_large_one(int8_bundle, bundle, prompts):
    sizes = [sum(file.stat().st_size for file in each.rglob("*") if file.is_file()) for each in (int8_bundle, bundle)]
    assert sizes[0] <= 0.35 * sizes[1]
    assert read(int8_bundle, "report.json")["exactness"]["kl_nats_per_token"] < 2e-3
    rows = []
    with Engine.load(int8_bundle) as small, Engine.load(bundle) as large:
        for prompt in prompts[:12]:
            tokens = small.tokenizer.encode(prompt)[:200]
            rows.append(kl(large.text_logits(tokens), small.text_logits(tokens)))
    assert 0 < np.concatenate(rows).mean() < 2e-3


@pytest.mark.nightly
def test_the_report_has_what_it_cost(int8_bundle):
    quality = read(int8_bundle, "report.json")["quality"]
    for cost in quality["models"].values():
        assert 0 < cost["kl_nats_per_token"] < 5e-3
        assert cost["logit_cosine"] > 0.99
        assert cost["perplexity"][1] == pytest.approx(cost["perplexity"][0], rel=0.02)
        assert 0.24 < cost["weight_bytes"] / cost["weight_bytes_before"] < 0.3
        assert all(layer["kl"] < 5e-3 and layer["cosine"] > 0.99 for layer in cost["layers"])
    assert min(quality["models"]["draft"]["acceptance_length"]) > 1


@pytest.mark.nightly
@pytest.mark.parametrize("batch_size", [1, 4])
def test_speculation_is_plain_decoding(int8_bundle, prompts, batch_size):
    with Engine.load(int8_bundle, batch_size=batch_size) as engine:
        tokens = [engine.tokenizer.encode(prompt) for prompt in prompts[:12]]
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_new_tokens=24, seed=0, temperature=temperature)
            expected = plain(engine, tokens, [params] * len(tokens))
            for tree in ("chain:4", "topk:4,4"):
                case = compare(engine, tree, tokens, [replace(params, speculation=tree)] * len(tokens), expected)
                assert case.exact, case


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_export")
def test_the_draft_alone(make_sharp_checkpoint, tmp_path):
    """An INT8 draft changes no token, only how many are accepted."""
    model = str(make_sharp_checkpoint(tmp_path / "model", num_hidden_layers=1))
    options = QuantizeOptions(calib_size=4)
    build(BuildConfig(model, tmp_path / "b", draft=model, draft_precision="int8", max_batch_size=1, quantize=options))
    manifest = read(tmp_path / "b", "manifest.json")
    assert (manifest["precision"], manifest["exactness_bound"]) == ("fp32", 1e-4)
    assert [manifest["models"][name]["precision"] for name in ("target", "draft")] == ["fp32", "int8"]
    with Engine.load(tmp_path / "b", drafter="model") as engine:
        prompt = engine.tokenizer.encode("def main(argv):\n    ")
        params = SamplingParams(max_new_tokens=32, seed=0)
        case = compare(engine, "int8 draft", [prompt], [params], plain(engine, [prompt], [params]))
    assert case.exact
    assert case.mean_acceptance_length > 1.5


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_export")
def test_the_targets_own_weights_in_int4_are_its_draft(make_sharp_checkpoint, tmp_path):
    model = str(make_sharp_checkpoint(tmp_path / "model", num_hidden_layers=1))
    options = QuantizeOptions(calib_size=4, calibration_cache=tmp_path / "cache")
    build(BuildConfig(model, tmp_path / "b", draft="self:int4", max_batch_size=1, quantize=options))
    models = read(tmp_path / "b", "manifest.json")["models"]
    assert models["draft"]["precision"] == "int4"
    assert models["draft"]["source_sha256"] == models["target"]["source_sha256"]
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 1
    assert read(tmp_path / "b", "report.json")["quality"]["models"]["draft"]["acceptance_length"][1] > 1.5


def read(bundle, name):
    found = json.loads((bundle / name).read_text(encoding="utf-8"))
    return found
