"""INT8: what is quantized, how close it stays, that it is stored once, and a bundle of it end to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from specbuild.builder.check import kl
from specbuild.builder.config import BuildConfig
from specbuild.builder.export import export
from specbuild.builder.layout import probe
from specbuild.builder.lower.onnxruntime import lower
from specbuild.builder.passes import census, clean, run_portable
from specbuild.builder.pipeline import build
from specbuild.builder.quantize import QuantizeInt8, to_blocks
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.backends import ModelSpec, Share, load
from specbuild.runtime.verify import compare, plain

Make = Callable[..., Any]
CAPACITY = 40
PROMPT = [5, 17, 3, 88, 42, 9, 9, 61]


def quantized(model: Any) -> ir.Model:
    graph = export(model, probe(model.config, CAPACITY), CAPACITY, CAPACITY)
    run_portable(graph)
    QuantizeInt8()(graph)
    clean(graph)
    return graph


def run(model: Any, graph: ir.Model, path: Path) -> np.ndarray:
    ir.save(lower(graph, 1, CAPACITY), path)
    layout = probe(model.config, CAPACITY)
    spec = ModelSpec("t", layout.layers, layout.kv_heads, layout.head_dim, model.config.vocab_size, CAPACITY, 16)
    executor = load("onnxruntime", path, spec, 1, threads=1)
    (rows,) = executor.step([Share(0, 0, 0, PROMPT, range(len(PROMPT)), None, len(PROMPT))])
    logits = rows.copy()
    executor.close()
    return logits


@given(arrays(np.float32, (3, 64), elements=st.floats(-1e4, 1e4, width=32)), st.sampled_from([16, 32, 64]))
def test_blocks_are_within_half_a_step(rows: np.ndarray, size: int) -> None:
    codes, scales = to_blocks(rows, size)
    assert codes.shape == (3, 64 // size, size)
    assert scales.shape == (3, 64 // size)
    restored = (codes.astype(np.float64) - 128) * scales[..., None]
    off = np.abs(restored.reshape(3, 64) - rows)
    assert (off <= np.repeat(scales, size, axis=1) * 0.5001 + 1e-30).all()


def test_what_is_quantized(make_model: Make) -> None:
    """Every weight matrix and the embedding; not the norms, and not the tables of positions."""
    graph = quantized(make_model())
    assert census(graph)["BlockMatMul"] == 9
    assert census(graph)["BlockGather"] == 1
    assert "MatMul" not in census(graph)
    floats = [
        v.name for v in graph.graph.initializers.values() if v.dtype == ir.DataType.FLOAT and len(v.shape or ()) == 2
    ]
    assert all("rotary" in str(name) or "scales" in str(name) for name in floats)


def test_rows_no_block_divides_stay_in_float32(make_model: Make) -> None:
    odd = {"hidden_size": 39, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 53}
    graph = quantized(make_model(num_hidden_layers=1, **odd))
    assert census(graph)["MatMul"] == 4
    assert census(graph)["BlockMatMul"] == 1  # the attention's output, 3 heads of 16


def test_a_tied_weight_is_stored_once(make_model: Make, tmp_path: Path) -> None:
    model = make_model(num_hidden_layers=1, tie_word_embeddings=True)
    graph = quantized(model)
    assert sum(v.shape == (97, 1, 32) for v in graph.graph.initializers.values()) == 1
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
    rows = [name for name in offsets if str(name).endswith("_int8_rows")]
    assert len(rows) == 1
    assert offsets[rows[0]] == offsets[str(rows[0]).removesuffix("_rows")]
    assert run(model, graph, tmp_path / "graph.onnx").shape == (len(PROMPT), 97)


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": True, "attention_bias": True}])
def test_logits_are_near_those_of_the_rounded_weights(make_model: Make, tmp_path: Path, fields: dict[str, Any]) -> None:
    model = make_model(hidden_size=64, **fields)
    logits = run(model, quantized(model), tmp_path / "graph.onnx")
    with torch.no_grad():
        exact = model(input_ids=torch.tensor([PROMPT])).logits[0].numpy()
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                weight = module.weight.numpy()
                codes, scales = to_blocks(
                    weight, next(size for size in (128, 64, 32, 16) if weight.shape[1] % size == 0)
                )
                rounded = (codes.astype(np.float32) - 128) * scales[..., None]
                module.weight.copy_(torch.from_numpy(rounded.reshape(weight.shape)))
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0].numpy()
    assert np.linalg.norm(logits - expected) < 0.08 * np.linalg.norm(expected)
    assert 0 < np.linalg.norm(logits - exact) < 0.08 * np.linalg.norm(exact)


def test_kl_is_scipys(make_model: Make) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(0, 3, (4, 11)).astype(np.float32) for _ in range(2))
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(1, keepdims=True) for x in (a, b))
    np.testing.assert_allclose(kl(a, b), (p * np.log(p / q)).sum(1), rtol=1e-6)
    np.testing.assert_allclose(kl(a, a), 0, atol=1e-12)


@pytest.fixture(scope="module")
def int8_bundle(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "int8.bundle"
    build(BuildConfig(str(pair / "target"), path, draft=str(pair / "draft"), precision="int8"))
    return path


def size(bundle: Path) -> int:
    return sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())


def test_a_small_bundle_near_the_large_one(int8_bundle: Path, bundle: Path, prompts: list[str]) -> None:
    assert size(int8_bundle) <= 0.35 * size(bundle)
    report = json.loads((int8_bundle / "report.json").read_text(encoding="utf-8"))
    assert report["exactness"]["kl_nats_per_token"] < 2e-3
    rows = []
    with Engine.load(int8_bundle) as small, Engine.load(bundle) as large:
        for prompt in prompts[:12]:
            tokens = small.tokenizer.encode(prompt)[:200]
            rows.append(kl(large.text_logits(tokens), small.text_logits(tokens)))
    assert 0 < np.concatenate(rows).mean() < 2e-3


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


def test_the_draft_alone(make_sharp_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """An INT8 draft changes no token, only how many are accepted."""
    model = str(make_sharp_checkpoint(tmp_path / "model", num_hidden_layers=1))
    build(BuildConfig(model, tmp_path / "b", draft=model, draft_precision="int8", max_batch_size=1))
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
