"""LoRA adapters: what is merged, by NumPy, and which are refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_gguf import write_gguf

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.frontend.checkpoint import find, load, model_of
from specbuild.builder.prepare import prepare
from specbuild.runtime import Bundle, Engine, SamplingParams
from specbuild.runtime.errors import CheckpointError, OptionError

RANK, ALPHA, HIDDEN = 4, 24, 32
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q: (64, HIDDEN), DOWN: (HIDDEN, 48)}


@pytest.fixture(scope="module")
def base(make_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return make_checkpoint(folder, initializer_range=0.2, tie_word_embeddings=False)


def make_adapter(folder, weights=None, **fields):
    """Write an adapter as PEFT does; return the folder and its factors by module."""
    generator = torch.Generator().manual_seed(0)
    draw = {
        name: (torch.randn(RANK, columns, generator=generator), torch.randn(rows, RANK, generator=generator) / 8)
        for name, (rows, columns) in SHAPES.items()
    }
    found = {f"base_model.model.{name}.lora_A.weight": a for name, (a, _) in draw.items()}
    found |= {f"base_model.model.{name}.lora_B.weight": b for name, (_, b) in draw.items()}
    folder.mkdir(exist_ok=True)
    found = found | (weights or {})
    save_file({name: w for name, w in found.items() if w is not None}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False} | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, {name: (a.numpy(), b.numpy()) for name, (a, b) in draw.items()}


@pytest.mark.parametrize(
    ("fields", "scales"),
    [
        ({}, {Q: 6.0, DOWN: 6.0}),
        ({"use_rslora": True}, {Q: 12.0, DOWN: 12.0}),
        ({"alpha_pattern": {"down_proj": 2, "other": 9}}, {Q: 6.0, DOWN: 0.5}),
    ],
)
def test_weights_are_sums(base, tmp_path, fields, scales):
    """W + scale · B · A, in whole and by rows; all others stay."""
    folder, factors = make_adapter(tmp_path / "a", **fields)
    before = find(str(base))
    after = find(str(base), str(folder))
    weights = model_of(after)[1]
    whole, rows = dict(load(after, "eager").named_parameters()), np.array([3, 0, 7])
    for name, weight in weights.items():
        expected = before.tensors[name].read().numpy()
        if (module := name.removesuffix(".weight")) in factors:
            a, b = factors[module]
            expected = expected + scales[module] * (b @ a)
        np.testing.assert_allclose(weight.read().numpy(), expected, atol=1e-5)
        np.testing.assert_allclose(whole[name].detach().numpy(), expected, atol=1e-5)
        np.testing.assert_allclose(weight.read(rows).numpy(), expected[rows], atol=1e-5)
    assert after.sha256() != before.sha256()


def test_an_embeddings_factors_are_turned(base, tmp_path):
    a, b = torch.randn(RANK, 4096), torch.randn(HIDDEN, RANK)
    name = "base_model.model.model.embed_tokens.lora_embedding_"
    folder, _ = make_adapter(tmp_path / "a", {f"{name}A": a, f"{name}B": b})
    key, rows = "model.embed_tokens.weight", np.array([4000, 1])
    found = find(str(base), str(folder)).tensors[key]
    expected = find(str(base)).tensors[key].read() + 6.0 * (b @ a).T
    torch.testing.assert_close(found.read(), expected)
    torch.testing.assert_close(found.read(rows), expected[rows])


def test_weights_that_lie_by_columns(make_gpt2, tmp_path):
    """GPT-2's are turned, and its adapters say so."""
    name, shape = "transformer.h.0.attn.c_attn", (32, 96)
    a, b = torch.randn(RANK, shape[0]), torch.randn(shape[1], RANK)
    others = {f"base_model.model.{module}.lora_{part}.weight": None for module in SHAPES for part in "AB"}
    own = {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    folder, _ = make_adapter(tmp_path / "a", others | own, fan_in_fan_out=True)
    before, after = find(str(make_gpt2)), find(str(make_gpt2), str(folder))
    weights = (dict(load(each, "eager").named_parameters())[f"{name}.weight"] for each in (before, after))
    before, after = weights
    torch.testing.assert_close(after, before + 6.0 * (b @ a).T)


@pytest.fixture(scope="module")
def make_gpt2(base, tmp_path_factory):
    import shutil

    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2")
    sizes = {"vocab_size": 4096, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "has use_dora True, which is not supported: merge it with PEFT"),
        ({"bias": "all"}, "has bias 'all'"),
        ({"peft_type": "LOHA"}, "has peft_type 'LOHA'"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "has target_parameters"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights 'pissa'"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "names of modules are supported alone"),
        ({"lora_alpha": "8"}, "has lora_alpha '8': it must be a number"),
    ],
)
def test_refuses_by_the_fields_name(base, tmp_path, fields, message):
    refused(base, make_adapter(tmp_path / "a", **fields)[0], message)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({f"{Q}.lora_A.weight": None}, f"has no A and B of one rank for {Q}"),
        ({f"{Q}.lora_A.weight": torch.zeros(5, HIDDEN)}, f"has no A and B of one rank for {Q}"),
        ({f"{Q}.lora_A.weight": torch.zeros(RANK, 31)}, f"adapts {Q} as [64, 31], the model's is [64, 32]"),
        ({f"{Q}.lora_magnitude_vector": torch.zeros(64)}, "which is no factor of LoRA"),
        (
            {"model.x.lora_A.weight": torch.zeros(RANK, 3), "model.x.lora_B.weight": torch.zeros(3, RANK)},
            "adapts 'model.x', which the model lacks",
        ),
    ],
)
def test_refuses_by_the_weights_name(base, tmp_path, weights, message):
    named = {f"base_model.model.{name}": weight for name, weight in weights.items()}
    refused(base, make_adapter(tmp_path / "a", named)[0], message)


def refused(base, folder, message):
    with pytest.raises(CheckpointError) as caught:
        find(str(base), str(folder))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refuses_a_folder_without_one(base, tmp_path):
    refused(base, base, "has no adapter_config.json")
    folder, _ = make_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refused(base, folder, "lacks adapter_model.safetensors: weights are read from safetensors only")


def test_refuses_what_is_embedding_and_head_at_once(make_checkpoint, tmp_path):
    tied = make_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    names = {f"lm_head.lora_{part}.weight": shape for part, shape in (("A", (RANK, HIDDEN)), ("B", (4096, RANK)))}
    weights = {f"base_model.model.{name}": torch.zeros(shape) for name, shape in names.items()}
    refused(tied, make_adapter(tmp_path / "a", weights)[0], "adapts lm_head, which is embedding and head in one")


@pytest.mark.slow
def test_a_bundle_is_that_of_the_merged_checkpoint(base, tmp_path, build_shared):
    folder, _ = make_adapter(tmp_path / "a")
    merged = tmp_path / "merged"
    load(find(str(base), str(folder)), "eager").save_pretrained(merged)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (merged / name).write_bytes((base / name).read_bytes())
    few = {"max_batch_size": 1, "max_seq_len": 64, "draft": str(base)}
    report = build_shared(
        target=str(base), adapter=str(folder), draft_adapter=str(folder), output=tmp_path / "adapted", **few
    )
    build_shared(target=str(merged), output=tmp_path / "plain", **few)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    texts = []
    for name in ("adapted", "plain"):
        with Engine.load(tmp_path / name, threads=1) as engine:
            texts.append(engine.generate([[5, 17, 300]], params)[0].token_ids)
    assert texts[0] == texts[1]
    assert report["sources"]["target"]["adapter"] == report["sources"]["draft"]["adapter"] == str(folder)
    records = Bundle.open(tmp_path / "adapted").manifest.models
    assert records["target"].source_sha256 == find(str(base), str(folder)).sha256()


def test_a_drafts_adapter_needs_a_draft(base, tmp_path):
    for draft in (None, "none", "self:int8"):
        with pytest.raises(OptionError, match="--draft-adapter is for a draft model of its own"):
            BuildConfig(str(base), tmp_path / "b", draft, draft_adapter="a")


def test_an_adapted_gguf_does_not_keep_its_numbers(base, tmp_path):
    """They are others then."""
    plain = BuildConfig(str(write_gguf(base, tmp_path / "m.gguf")), tmp_path / "b")
    adapted = replace(plain, adapter=str(make_adapter(tmp_path / "a")[0]))
    assert (plain.precision_of("target"), adapted.precision_of("target")) == ("keep", "fp32")
    with pytest.raises(OptionError, match=r"which an adapter changes: give another --precision$"):
        prepare(replace(adapted, precision="keep"))
