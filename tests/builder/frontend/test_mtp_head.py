"""MTP layers of checkpoints: what they compute, and which are read."""

import pytest
import torch
from mtp_checkpoints import FAMILIES, LAYERS, make_mtp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from specbuild.builder.frontend.attention_layout import Layout
from specbuild.builder.frontend.checkpoint import find, load
from specbuild.builder.frontend.mtp_head import find_mtp, load_mtp
from specbuild.runtime.errors import CheckpointError


@pytest.fixture
def made(tmp_path):
    return make_mtp(tmp_path, "deepseek_v3")


def loaded(folder):
    target = find(str(folder))
    return load_mtp(find_mtp(target), load(target, "eager"))


def change(folder, **weights):
    """Change weights of the MTP layer; None drops one."""
    path = folder / "model.safetensors"
    named = {f"model.layers.{LAYERS}.{name.replace('__', '.')}": weight for name, weight in weights.items()}
    found = load_file(path) | named
    save_file({name: weight for name, weight in found.items() if weight is not None}, path, {"format": "pt"})


def theirs(folder):
    """A model and its MTP layers as transformers loads them, told what its configuration does not say."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model._keys_to_ignore_on_load_unexpected = [r"^mtp.*", rf"model\.layers\.{LAYERS}\..*"]
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    model.config.mtp_mlp_layer_types = ["sparse"]
    return model, MtpModel.from_pretrained(model)


@pytest.mark.slow
@pytest.mark.nightly(but=("qwen3_5_text", "deepseek_v3"))
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_computes_what_transformers_does(family, tmp_path):
    """Whose positions are one higher: rotations depend on differences alone."""
    make_mtp(tmp_path, family)
    head, (model, expected) = loaded(tmp_path), theirs(tmp_path)
    ids = torch.randint(4096, (1, 9), generator=torch.Generator().manual_seed(0))
    hidden = model(ids, output_hidden_states=True).hidden_states[-1][:, :-1]
    logits, after = head(ids[:, 1:], hidden, torch.arange(8)[None])
    cache = MtpCache(config=model.config.get_mtp_config())
    states = expected.forward_layer(0, hidden, torch.arange(1, 9)[None], cache, input_ids=ids[:, 1:])
    torch.testing.assert_close(after, states, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, expected._project_to_logits(states), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(head(ids[:, 1:], hidden, torch.arange(8)[None], 2)[0], logits[:, -2:])


def test_is_no_part_of_the_target(tmp_path):
    """Whose weights are read one at a time, as without it, and counted alone."""
    make_mtp(tmp_path, "qwen3_5_text")
    target = find(str(tmp_path))
    assert target.tensors is not None
    assert not any("mtp" in name for name in target.tensors)
    assert target.parameters == sum(weight.numel() for weight in load(target, "eager").parameters())
    assert find_mtp(target).parameters > 0


def test_has_one_layer_of_full_attention(tmp_path):
    make_mtp(tmp_path, "qwen3_5_text")
    layout = find_mtp(find(str(tmp_path))).layout(128)
    assert layout == Layout.alike(2, 16, (0,))


def test_of_several_layers_the_first_is_taken(made):
    path = made / "model.safetensors"
    weights = load_file(path)
    second = {
        name.replace(f"layers.{LAYERS}.", f"layers.{LAYERS + 1}."): weight + 1.0
        for name, weight in weights.items()
        if f"layers.{LAYERS}." in name
    }
    first = loaded(made).state_dict()
    save_file(weights | second, path, {"format": "pt"})
    again = loaded(made).state_dict()
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_copies_of_the_targets_own_weights_are_not_read(made):
    """As DeepSeek publishes them."""
    change(made, embed_tokens__weight=torch.zeros(4096, 64), shared_head__head__weight=torch.zeros(4096, 64))
    assert loaded(made).embed_tokens.weight.any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"enorm__weight": None}, "missing keys, the first is layers.0.enorm.weight"),
        ({"enorm__weight": torch.ones(65)}, "mismatched keys, the first is layers.0.enorm.weight"),
        ({"strange__weight": torch.ones(64)}, "unexpected keys, the first is layers.0.mtp_block.strange.weight"),
        ({"hnorm__weight": torch.full((64,), torch.nan)}, "NaN or infinite values in layers.0.hnorm.weight"),
    ],
)
def test_refuses(made, changed, message):
    change(made, **changed)
    with pytest.raises(CheckpointError) as caught:
        loaded(made)
    assert message in str(caught.value)
    assert str(caught.value).endswith("give --draft none")
    assert "\n" not in str(caught.value)


def test_refuses_a_checkpoint_without_one(made):
    change(made, eh_proj__weight=None)
    with pytest.raises(CheckpointError, match=r"has no MTP layer, mtp.fc or eh_proj: give another --draft$"):
        find_mtp(find(str(made)))


def test_refuses_a_layer_whose_attention_nothing_says(tmp_path):
    """Half of the target's layers have windows."""
    make_mtp(tmp_path, "qwen2")
    with pytest.raises(CheckpointError, match=r"config.json does not say which of .* its MTP layer is"):
        find_mtp(find(str(tmp_path))).layout(128)
