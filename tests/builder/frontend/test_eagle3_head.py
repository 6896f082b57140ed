"""EAGLE-3 heads: what they compute, and which checkpoints are read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import DynamicCache

from specbuild.builder.frontend.checkpoint import find
from specbuild.builder.frontend.eagle3_head import (
    EagleHead,
    find_head,
    head_config,
    load_head,
    save_head,
    trim_head,
)
from specbuild.runtime.errors import CheckpointError

VOCAB, HIDDEN, DRAFTED = 4096, 32, 40
RAW = {
    **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN},
    **{"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"num_hidden_layers": 1, "vocab_size": VOCAB, "draft_vocab_size": DRAFTED, "rms_norm_eps": 1e-5},
    **{"rope_theta": 5000.0, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}},
}


@pytest.fixture(scope="module")
def target(make_checkpoint, tmp_path_factory):
    return find(str(make_checkpoint(tmp_path_factory.mktemp("target"))))


def make_head(target, **fields):
    torch.manual_seed(1)
    head = EagleHead(head_config(RAW | fields, target.config)).float().eval()
    for weight in head.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.3)
    tokens = torch.randperm(VOCAB)[:DRAFTED].sort().values
    head.d2t.copy_(tokens - torch.arange(DRAFTED))
    head.t2d[tokens] = True
    return head


@pytest.fixture(scope="module")
def head(target):
    return make_head(target)


@pytest.fixture
def saved(head, tmp_path):
    save_head(tmp_path, head)
    return tmp_path


def rows(length):
    torch.manual_seed(2)
    return torch.randint(VOCAB, (2, length)), torch.randn(2, length, HIDDEN), torch.arange(length).expand(2, -1)


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x):
    """`[T, heads, D]`, row t turned by t."""
    length, _, width = x.shape
    angles = torch.arange(length)[:, None] * 5000.0 ** (-torch.arange(0, width, 2) / width)
    first, second = x[..., : width // 2], x[..., width // 2 :]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def plain(w, ids, hidden, before):
    """One text through a head, written out: logits and hidden states."""
    layer = {name.removeprefix("midlayer.").removesuffix(".weight"): weight for name, weight in w.items()}
    normed = norm(hidden, layer["hidden_norm"])
    x = torch.cat((norm(layer["embed_tokens"][ids], layer["input_layernorm"]), normed), -1)
    q, k, v = ((x @ layer[f"self_attn.{name}_proj"].T).view(len(ids), -1, 16) for name in "qkv")
    q, k = rotated(q), rotated(k)
    out = torch.zeros_like(q)
    for t in range(len(ids)):
        for one in range(4):
            out[t, one] = (k[: t + 1, one // 2] @ q[t, one] / 4).softmax(0) @ v[: t + 1, one // 2]
    residual = (normed if before else hidden) + out.flatten(1) @ layer["self_attn.o_proj"].T
    x = norm(residual, layer["post_attention_layernorm"])
    gated = F.silu(x @ layer["mlp.gate_proj"].T) * (x @ layer["mlp.up_proj"].T)
    hidden = residual + gated @ layer["mlp.down_proj"].T
    return norm(hidden, layer["norm"]) @ layer["lm_head"].T, hidden


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_computes_what_the_paper_says(target, attention, before):
    head = make_head(target, norm_before_residual=before)
    head.set_attn_implementation(attention)
    ids, hidden, positions = rows(7)
    found = head(ids, hidden, positions)
    for one in range(2):
        expected = plain(dict(head.state_dict()), ids[one], hidden[one], before)
        torch.testing.assert_close(tuple(each[one] for each in found), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_goes_on_from_a_cache_and_keeps_the_logits_asked_for(head):
    given, cache = rows(7), DynamicCache()
    logits, states = head(*given)
    head(*(each[:, :4] for each in given), past_key_values=cache)
    later = (each[:, 4:] for each in given)
    few, after = head(*later, past_key_values=cache, logits_to_keep=torch.tensor([1]))
    torch.testing.assert_close(after, states[:, 4:])
    torch.testing.assert_close(few, logits[:, 5:6])
    torch.testing.assert_close(head(*given, logits_to_keep=2)[0], logits[:, -2:])


def test_positions_are_the_same_in_16_bits(target):
    head = make_head(target)
    before = head.rotary_emb.inv_freq.clone()
    assert torch.equal(head.to(torch.bfloat16).rotary_emb.inv_freq, before)
    assert head.norm.weight.dtype == torch.bfloat16


@torch.no_grad()
def test_loses_what_no_token_has(target):
    head, ids, hidden, positions = make_head(target), *rows(5)
    drafted, before = head.tokens, head(ids % 3000, hidden, positions)[0]
    tokens = [token for token in range(3500) if token not in drafted[:2].tolist()]
    trim_head(head, tokens)
    left = torch.isin(drafted, torch.tensor(tokens))
    assert 0 < left.sum() < DRAFTED - 2
    assert torch.equal(head.tokens, drafted[left])
    torch.testing.assert_close(head(ids % 3000, hidden, positions)[0], before[..., left])
    assert (len(head.embed_tokens.weight), head.config.vocab_size, len(head.t2d)) == (3500, 3500, 3500)
    assert head.config.draft_vocab_size == len(head.lm_head.weight) == left.sum()


def test_reads_what_it_saved(head, saved, target):
    found = find_head(str(saved), target)
    loaded = load_head(found, head.embed_tokens.weight)
    assert found.taps == (0, 2)
    assert loaded.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(weight, head.state_dict()[name]) for name, weight in loaded.state_dict().items())
    assert loaded.tokens[0] == loaded.d2t[0]
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]


def rewrite(folder, config=None, **changed):
    """Change a head's config.json and weights; None drops a weight."""
    weights = load_file(folder / "model.safetensors")
    weights |= {name.replace("__", "."): weight for name, weight in changed.items()}
    save_file({name: w for name, w in weights.items() if w is not None}, folder / "model.safetensors")
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | (config or {})
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def test_reads_the_layout_of_speculators(head, saved, target):
    weights = load_file(saved / "model.safetensors")
    weights = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
    own = torch.randn(VOCAB, HIDDEN)
    save_file(weights | {"embed_tokens.weight": own}, saved / "model.safetensors")
    layer = {name: value for name, value in RAW.items() if name not in ("architectures", "draft_vocab_size")}
    config = {
        **{"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": DRAFTED},
        **{"target_hidden_size": None, "transformer_layer_config": layer, "eagle_aux_hidden_state_layer_ids": [2, 1]},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/name"}},
    }
    (saved / "config.json").write_text(json.dumps(config))
    found = find_head(str(saved), target)
    loaded = load_head(found, head.embed_tokens.weight)
    assert found.taps == (2, 1)
    assert found.config.norm_before_residual  # speculators' default
    assert torch.equal(loaded.embed_tokens.weight, own)
    assert torch.equal(loaded.midlayer.mlp.up_proj.weight, head.midlayer.mlp.up_proj.weight)


def test_reads_prefixed_names_and_whole_vocabularies(target, saved):
    weights = load_file(saved / "model.safetensors")
    weights = {f"model.{name}": weight for name, weight in weights.items() if name not in ("d2t", "t2d")}
    weights["model.lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    weights["model.fc.bias"] = torch.randn(HIDDEN)
    save_file(weights, saved / "model.safetensors")
    rewrite(saved, {"draft_vocab_size": None, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40})
    loaded = load_head(find_head(str(saved), target), torch.zeros(VOCAB, HIDDEN))
    assert torch.equal(loaded.tokens, torch.arange(VOCAB))
    assert torch.equal(loaded.fuse(torch.zeros(1, 1, 2 * HIDDEN))[0, 0], weights["model.fc.bias"])


@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        ({"vocab_size": 5000}, {}, "target of vocab_size 5000, not 4096"),
        ({"num_attention_heads": 0}, {}, "config.json cannot be used"),
        ({"norm_before_fc": True}, {}, "norm_before_fc"),
        ({}, {"model.norm.weight": torch.zeros(HIDDEN)}, "has norm.weight twice"),
        ({"hidden_size": 64}, {}, "target of hidden_size 64, not 32"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 9]}}, {}, r"reads layers \[0, 9\] of a target"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, {}, "must be a list of layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "reads the last layer alone"),
        ({"model_type": "qwen3"}, {}, "is a 'qwen3' head"),
        ({}, {"fc__weight": torch.zeros(HIDDEN, 3 * HIDDEN)}, r"fc.weight of shape \[32, 96\]"),
        ({}, {"d2t": None}, "lacks d2t"),
        ({}, {"d2t": torch.zeros(DRAFTED)}, "not of int64"),
        ({}, {"layers.1.mlp.up_proj.weight": torch.zeros(1)}, "which is no part of a head of one layer"),
        ({}, {"norm__weight": torch.full((HIDDEN,), torch.nan)}, "NaN or infinite values in norm.weight"),
        ({}, {"d2t": torch.full((DRAFTED,), VOCAB)}, "d2t that names no"),
        ({}, {"d2t": -torch.arange(DRAFTED)}, "twice the same token"),
        ({}, {"t2d": torch.zeros(VOCAB, dtype=torch.bool)}, "t2d that is not its d2t's"),
        (
            {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None, "eagle_config": None},
            {},
            "no EAGLE-3 head",
        ),
    ],
)
def test_refuses(saved, target, config, changed, message):
    rewrite(saved, config, **changed)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_head(find_head(str(saved), target), torch.zeros(VOCAB, HIDDEN))
    assert "\n" not in str(caught.value)


def test_refuses_pickled_weights(saved, target):
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="convert them"):
        find_head(str(saved), target)
