"""The text model of a multimodal checkpoint: its own class and weights, whose logits are the whole model's on text."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SIZES
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from specbuild.builder.frontend.checkpoint import find, load
from specbuild.runtime.errors import CheckpointError

TEXT = {name: size for name, size in SIZES.items() if name != "head_dim"} | {"vocab_size": 4096}
TEXT |= {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
IMAGE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
FAMILIES = {
    "gemma3": {
        "text_config": TEXT | {"head_dim": 8, "query_pre_attn_scalar": 8},
        "vision_config": IMAGE | {"image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "qwen2_5_vl": {
        "text_config": TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "out_hidden_size": 32,
        },
        "tie_word_embeddings": False,
    },
}
TOKENS = {"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"}
# How hubs and versions of transformers name the text model's weights.
LAYOUTS = ("language_model.model.", "model.language_model.", "model.")


def renamed(name, layout):
    bare = re.sub(r"^(model\.)?language_model\.(model\.)?", "", name)
    if bare == name:
        return name
    if bare.startswith("lm_head."):
        return f"language_model.{bare}" if layout.startswith("language_model") else bare
    return layout + bare


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def whole(request, pair, tmp_path_factory):
    """A multimodal checkpoint of random weights, and its model."""
    folder = tmp_path_factory.mktemp("multimodal") / request.param
    torch.manual_seed(0)
    fields = dict.fromkeys(TOKENS, 5) | {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[request.param](**fields | FAMILIES[request.param]))
    model.eval().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(pair / "target" / name, folder / name)
    return folder, model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_logits_are_the_whole_models_on_text(whole, layout, tmp_path):
    original, model = whole
    folder = Path(shutil.copytree(original, tmp_path / "copy"))
    weights = {renamed(name, layout): weight for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    found = find(str(folder))
    assert found.origin is not None
    assert found.origin.to_dict() == {"text_model_of": original.name}
    assert found.parameters < sum(weight.numel() for weight in model.parameters())
    ids = torch.randint(8, 4096, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs, ours = model(input_ids=ids).logits, load(found, "eager")(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_sizes_beyond_its_weights_are_refused_before_a_model_is_made(whole, tmp_path):
    folder = Path(shutil.copytree(whole[0], tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 1_000_000_000
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_hidden_layers 1000000000, its weights have"):
        find(str(folder))
