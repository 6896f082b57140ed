"""Every family end to end: a tiny random pair's tokens are transformers' greedy ones, and plain decoding's."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest

from specbuild.builder.codegen.emit import Caches, emit
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.frontend import checkpoint
from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.export import export
from specbuild.builder.frontend.reference import greedy as hugging_face
from specbuild.builder.passes import run_portable
from specbuild.builder.pipeline import build
from specbuild.measure.exactness import compare, plain
from specbuild.runtime import Engine, SamplingParams

FEW, MANY = 4, 32  # prompts
CAPACITY = 128
LAYERS, NEW_TOKENS, TREES = 2, 20, ("chain:4", "topk:4,3", "best:12")
LLAMA = {"FuseRMSNorm": 5, "FuseRotary": 2, "FuseSwiGLU": 2, "FuseQKV": 2, "FuseGateUp": 2, "FuseResidualNorm": 4}
GEMMA = LLAMA | {"FuseSwiGLU": 0, "FuseRMSNorm": 9, "FoldTiedHead": 1}
SCALED = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = SCALED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
TIED = {"tie_word_embeddings": True}
LOCAL = ["sliding_attention", "full_attention"]

# name: model type, fields, what the passes match
FAMILIES = {
    "llama": ("llama", {}, LLAMA),
    "llama-mha-biases-tied": (
        "llama",
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True} | TIED,
        LLAMA | {"FoldTiedHead": 1},
    ),
    "llama-mqa-rope-llama3": (
        "llama",
        {"num_key_value_heads": 1, "rope_parameters": LLAMA3 | {"rope_type": "llama3"}},
        LLAMA,
    ),
    "llama-rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        LLAMA,
    ),
    "qwen2-tied": ("qwen2", TIED, LLAMA | {"FoldTiedHead": 1}),
    "qwen2-yarn-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
        | {"rope_parameters": SCALED | {"rope_type": "yarn"}},
        LLAMA,
    ),
    "qwen3": ("qwen3", {}, LLAMA | {"FuseRMSNorm": 9}),
    "mistral": ("mistral", {"sliding_window": 5}, LLAMA),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0,
        },
        GEMMA,
    ),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 6, "query_pre_attn_scalar": 16, "layer_types": LOCAL},
        GEMMA | {"FuseRMSNorm": 13},
    ),
    "phi3": ("phi3", {"sliding_window": 11, "rope_parameters": PARTIAL}, LLAMA | {"FuseQKV": 0, "FuseGateUp": 0}),
    "olmo2": ("olmo2", {}, LLAMA | {"FuseRMSNorm": 9, "FuseResidualNorm": 1}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}, LLAMA | {"FuseRotary": 1, "FoldTiedHead": 1}),
}
needs_rtx = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx")
# those whose layers are of different kinds; the others' engines only in a soak
UNLIKE = ("llama-mqa-rope-llama3", "qwen3", "gemma2", "gemma3", "phi3", "smollm3")


@pytest.mark.soak(only=("phi3",))
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama-mqa-rope-llama3", "qwen2-yarn-window", "qwen3", "gemma3", "phi3"])
def test_tokens(make_family, tmp_path, prompts, name):
    decodes_exactly(make_family, tmp_path, prompts[:FEW], name)


@pytest.mark.soak(only=("144", "256"))
@pytest.mark.nightly
@pytest.mark.parametrize("head_dim", [80, 144, 256])
def test_wide_heads_have_a_class(make_family, tmp_path, head_dim):
    """Gemma's 256 columns a head are added up otherwise over 64 rows than over more; a text may be short or long."""
    target = make_family(tmp_path / "target", "gemma3_text", num_hidden_layers=1, head_dim=head_dim, sliding_window=6)
    build(BuildConfig(str(target), tmp_path / "bundle", max_batch_size=4, tune=False))
    for batch_size in (1, 4):
        with Engine.load(tmp_path / "bundle", batch_size=batch_size) as engine:
            assert engine.exact
            text = np.random.default_rng(1).integers(0, 4096, 150).tolist()
            with engine.scheduler.exclusive() as loop:
                expected = loop.logits(text, len(text), 64)
                for size in (1, 2, 3, 17, 63, 65):
                    assert np.array_equal(loop.logits(text, len(text), size), expected), size


@pytest.mark.soak
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_many_prompts(make_family, tmp_path, prompts, name):
    decodes_exactly(make_family, tmp_path, prompts[:MANY], name)


def decodes_exactly(make_family, tmp_path, prompts, name):
    """Build a random pair of the family, and hold all trees at two batch sizes against both references."""
    model_type, fields, matches = FAMILIES[name]
    target = make_family(tmp_path / "target", model_type, num_hidden_layers=LAYERS, **fields)
    draft = make_family(tmp_path / "draft", model_type, noise=0.05, num_hidden_layers=LAYERS, **fields)
    report = build(BuildConfig(str(target), tmp_path / "bundle", draft=str(draft), max_batch_size=4))
    assert {k: v for k, v in report["matched_passes"]["target"].items() if k in LLAMA | {"FoldTiedHead": 0}} == {
        "FoldTiedHead": 0
    } | matches
    greedy = SamplingParams(max_new_tokens=NEW_TOKENS, seed=0)
    sampled = replace(greedy, temperature=1.0, top_p=0.9)
    model = checkpoint.load(checkpoint.find(str(target)), "eager")
    for batch_size in (1, 4):
        with Engine.load(tmp_path / "bundle", batch_size=batch_size, drafter="model") as engine:
            tokens = [engine.tokenizer.encode(prompt)[:60] for prompt in prompts]
            if batch_size == 1:
                references = [reference.tokens for reference in hugging_face(model, tokens, NEW_TOKENS, [0])]
            off = [replace(greedy, speculation="off")] * len(tokens)
            assert compare(engine, f"{name} against transformers", tokens, off, references).exact
            for params in (greedy, sampled):
                expected = plain(engine, tokens, [params] * len(tokens))
                for tree in TREES:
                    each = [replace(params, speculation=tree)] * len(tokens)
                    case = compare(engine, f"{name}, {tree}", tokens, each, expected)
                    assert case.exact, case
                    assert case.mean_acceptance_length > 1.1


@pytest.mark.soak(only=("gemma2", "llama-mqa-rope-llama3", "phi3", "smollm3"))
@pytest.mark.nightly
@needs_rtx
@pytest.mark.parametrize("name", UNLIKE)
def test_engines(make_family, tmp_path, name):
    compiles_whole(make_family, tmp_path, name)


@needs_rtx
@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in UNLIKE])
def test_engines_of_like_families(make_family, tmp_path, name):
    compiles_whole(make_family, tmp_path, name)


def compiles_whole(make_family, tmp_path, name):
    """Every layer of a family becomes TensorRT's attention over a cache updated in place."""
    model_type, fields, matches = FAMILIES[name]
    found = checkpoint.find(str(make_family(tmp_path / "target", model_type, num_hidden_layers=LAYERS, **fields)))
    graph = export(checkpoint.load(found, "eager"), probe(found.config, CAPACITY), CAPACITY, CAPACITY)
    run_portable(graph)
    precision = ("fp16", "bf16", "fp32")[list(FAMILIES).index(name) % 3]
    options = {"backend": "tensorrt-rtx", "precision": precision, "buckets": (1, 8)}
    config = BuildConfig(found.source, tmp_path / "b", **options)
    emitted = emit(tmp_path / "bundle", "target", graph, config, Caches(CAPACITY, 100))
    layers = emitted.report["layer_types"]
    by_layer = emitted.report["model_layers"]
    assert [each["layer"] for each in by_layer] == list(range(LAYERS))
    capped = "attn_logit_softcapping" in fields  # written out: TensorRT's attention has none
    assert [len(each["attention"]) for each in by_layer] == [int(not capped)] * LAYERS
    assert layers.get("SOFTMAX", 0) == LAYERS * capped
    assert [len(each["kv_cache_update"]) for each in by_layer] == [2] * LAYERS
    rotary = sum(len(each["rotary_embedding"]) for each in by_layer)
    assert rotary == layers.get("ROTARY_EMBEDDING", 0) == 2 * matches["FuseRotary"]
    (record,) = emitted.engines.values()
    assert list(record.profiles) == ["nodes1", "nodes8", "prompt"]


@pytest.mark.soak(only=("glm", "mixtral"))
@needs_rtx
@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["gpt2", "glm", "mixtral"])
def test_engines_of_others(make_family, tmp_path, model_type):
    """What is exported otherwise compiles too: learned positions, another rotation, experts."""
    fields = {"gpt2": {"n_layer": 1}, "mixtral": {"num_hidden_layers": 1, "num_local_experts": 4}}
    target = make_family(tmp_path / "target", model_type, **fields.get(model_type, {"num_hidden_layers": 1}))
    options = {"backend": "tensorrt-rtx", "buckets": (1, 8), "cuda_arch": ("none",), "max_seq_len": 100}
    report = build(BuildConfig(str(target), tmp_path / "bundle", **options))
    (layer,) = report["engines"]["target"]["model_layers"]
    assert (len(layer["attention"]), len(layer["kv_cache_update"])) == (1, 2)
    assert report["exactness"]["graph_logit_difference"] < 1e-3


@pytest.mark.soak(only=("glm-fields1",))
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gpt2", {"n_layer": 1}),  # learned positions, one product for q, k and v, LayerNorm
        ("glm", {"num_hidden_layers": 1}),  # another rotation, exported as it is
        ("mixtral", {"num_hidden_layers": 1, "num_local_experts": 4}),
    ],
)
def test_others(make_family, tmp_path, model_type, fields):
    """Families nobody prepared for; a build ends with a check against transformers."""
    target = make_family(tmp_path / "target", model_type, **fields)
    report = build(BuildConfig(str(target), tmp_path / "bundle", max_batch_size=1))
    assert report["exactness"]["largest_logit_difference"] < 1e-3
    assert all(case["exact"] for case in report["exactness"]["cases"])


@pytest.mark.nightly
def test_a_text_to_the_last_learned_position(make_family, tmp_path):
    """Trees reach past a table of positions that ends with the longest text; what they hold there is never emitted."""
    fields = {"n_layer": 1, "max_position_embeddings": 48}
    target, draft = (make_family(tmp_path / name, "gpt2", noise=0.05 * at, **fields) for at, name in enumerate("td"))
    build(BuildConfig(str(target), tmp_path / "bundle", draft=str(draft), max_batch_size=2))
    params = SamplingParams(max_new_tokens=48, ignore_eos=True, seed=0)
    with Engine.load(tmp_path / "bundle", batch_size=2, drafter="model") as engine:
        tokens = [[5, 9, 2], [7, 7, 1, 30]]
        expected = plain(engine, tokens, [params] * 2)
        assert [len(text) for text in expected] == [45, 44]
        for tree in ("chain:16", "best:12"):
            assert compare(engine, tree, tokens, [replace(params, speculation=tree)] * 2, expected).exact
