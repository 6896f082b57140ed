"""Tiny random checkpoints with an MTP layer, under the names by which Qwen, DeepSeek and GLM publish theirs."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_families import tiny

LAYERS = 4
TOKENIZER = Path(__file__).parents[2] / "engines/pycode/target"
LINEAR = ["linear_attention"] * 3 + ["full_attention"]
FAMILIES = {
    "qwen3_next": {"layer_types": [*LINEAR, "full_attention"]},
    "qwen3_5_text": {"layer_types": [*LINEAR, "full_attention"]},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe": {"first_k_dense_replace": 1},
}
QWEN = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


def make_mtp(folder, family, agrees=False):
    """Write a checkpoint whose last layer is an MTP layer.

    If it `agrees`, the next token depends on the one before alone, and the layer predicts what the target does.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    fields = {"num_hidden_layers": LAYERS + 1, "tie_word_embeddings": False, "initializer_range": 0.2}
    config = tiny(family, **fields | FAMILIES.get(family, {}))
    model = AutoModelForCausalLM.from_config(config).eval()
    if agrees:
        silence(model)
    model.save_pretrained(folder)
    path, size = Path(folder) / "model.safetensors", config.hidden_size
    weights = load_file(path)
    further = {f"model.layers.{LAYERS}.{name}": weight for name, weight in extras(weights, size, agrees).items()}
    weights |= further
    if family.startswith("qwen"):
        weights = {qwen_name(name): weight for name, weight in weights.items()}
    save_file(weights, path, {"format": "pt"})
    raw = json.loads((path.parent / "config.json").read_text())
    raw["num_hidden_layers"] = LAYERS
    if "layer_types" in raw:
        raw["layer_types"] = raw["layer_types"][:LAYERS]
    (path.parent / "config.json").write_text(json.dumps(raw))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, path.parent / name)
    return path.parent


def silence(model):
    """Make a model's layers add nothing to the embedding."""
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
        model.get_output_embeddings().weight.normal_()
        for name, weight in model.named_parameters():
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                weight.zero_()


def extras(weights, size, agrees):
    """What an MTP layer has beside a layer: norms, and the projection of both inputs."""
    norm = weights["model.norm.weight"]
    random = torch.randn(size, 2 * size) * (2 * size) ** -0.5
    projection = torch.cat((torch.eye(size), torch.zeros(size, size)), 1) if agrees else random
    scales = [norm.clone() if agrees else norm + 0.1 * torch.randn(size) for _ in range(3)]
    return {"eh_proj.weight": projection} | {
        f"{name}.weight": scale for name, scale in zip(("enorm", "hnorm", "shared_head.norm"), scales, strict=True)
    }


def qwen_name(name):
    """Qwen's name of a weight."""
    prefix = f"model.layers.{LAYERS}."
    inner = name.removeprefix(prefix)
    if inner == name:
        return name
    module = inner.removesuffix(".weight")
    return f"mtp.{QWEN[module]}.weight" if module in QWEN else f"mtp.layers.0.{inner}"
