"""A smaller model of a target's architecture, and its initialisation with the target's weights."""

from __future__ import annotations

import copy
import re

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specbuild.runtime.errors import OptionError, one_line

from .options import LAYERS, MLP, DistillConfig, flag

_OF_LAYERS = re.compile(
    r"\w*layer_types|no_rope_layers|layers_block_type|\w+_pattern"
)  # configuration fields with one entry per layer
_FIELDS = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}


def derive(config: DistillConfig, target: PreTrainedConfig) -> PreTrainedConfig:
    """Return the target's configuration with fewer layers and smaller sizes.

    Heads keep their size. Sizes that were not given shrink with the width. Raises OptionError if no model of the
    target's architecture has the shape, or if it cannot be initialised from the target.
    """
    width = config.hidden_size or target.hidden_size
    layers = config.layers or min(LAYERS[config.kind], target.num_hidden_layers)
    if config.init == "target":
        for name, asked, has in (
            ("layers", layers, target.num_hidden_layers),
            ("hidden-size", width, target.hidden_size),
        ):
            if asked > has:
                raise OptionError(f"the target has --{name} {has}, not {asked}: give less, or --init random")
    sizes: dict[str, int] = {"hidden_size": width, "num_hidden_layers": layers}
    heads = config.num_heads or max(1, target.num_attention_heads * width // target.hidden_size)
    sizes["num_attention_heads"] = heads
    if getattr(target, "num_key_value_heads", None):
        share = max(1, target.num_key_value_heads * heads // target.num_attention_heads)
        sizes["num_key_value_heads"] = config.num_kv_heads or max(n for n in range(1, share + 1) if heads % n == 0)
        if heads % sizes["num_key_value_heads"]:
            raise OptionError(f"--num-heads {heads} is no multiple of {sizes['num_key_value_heads']} key-value heads")
    if isinstance(inner := getattr(target, "intermediate_size", None), int):
        sizes["intermediate_size"] = config.intermediate_size or max(
            1, round((1 if config.layers else MLP) * inner * width / target.hidden_size)
        )
    for name in config.shape:
        if _FIELDS.get(name, "num_hidden_layers" if name == "layers" else name) not in sizes:
            raise OptionError(f"{target.model_type!r} models have no {name}: drop --{flag(name)}")
    fields = copy.deepcopy(target).to_dict() | sizes
    picked = chosen(target.num_hidden_layers, layers)
    for name, value in fields.items():
        if _OF_LAYERS.fullmatch(name) and isinstance(value, list) and len(value) == target.num_hidden_layers:
            fields[name] = [value[layer] for layer in picked]
    try:
        derived = type(target).from_dict(fields)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(derived)
    except Exception as error:  # transformers raises many unrelated types
        raise OptionError(f"no {target.model_type!r} model has this shape, {one_line(error)}: give another") from None
    return derived


def chosen(target: int, layers: int) -> list[int]:
    """Return the target layer that each draft layer copies: evenly spaced from first to last, or cyclic if deeper."""
    if layers > target:
        return [layer % target for layer in range(layers)]
    return [round(n * (target - 1) / max(1, layers - 1)) for n in range(layers)]


@torch.no_grad()
def initialise(net: PreTrainedModel, model: PreTrainedModel) -> dict[str, int]:
    """Copy those of the target's weights that fit into a draft, and return how many parameters began as what.

    MLPs keep the channels with the largest weights. A draft of smaller width has the principal components of the
    embedding and of the head, and random layers.

    Args:
        net: The draft, changed in place.
        model: The target.

    Returns:
        The number of parameters that are "target" (copied), "narrowed", or "random" (unchanged).
    """
    theirs, ours = model.config.get_text_config(), net.config
    picked, counts = chosen(theirs.num_hidden_layers, ours.num_hidden_layers), {"target": 0, "narrowed": 0, "random": 0}
    of_target = dict(model.named_parameters(remove_duplicate=False))
    edges = [net.get_input_embeddings().weight, net.get_output_embeddings().weight]
    inner = getattr(theirs, "intermediate_size", 0), getattr(ours, "intermediate_size", 0)
    kept: dict[int, Tensor] = {}
    for name, weight in net.named_parameters():
        layer = _layer(name)
        other = of_target.get(name if layer is None else re.sub(r"\.(\d+)\.", f".{picked[layer]}.", name, count=1))
        how = "random"
        if other is not None and other.shape == weight.shape:
            weight.copy_(other)
            how = "target"
        elif other is not None and any(weight is edge for edge in edges):
            size = min(len(weight), len(other))
            weight[:size] = _components(other, weight.shape[1])[:size].to(weight)
            how = "narrowed"
        elif other is not None and layer is not None and ours.hidden_size == theirs.hidden_size:
            dims = [d for d, (a, b) in enumerate(zip(other.shape, weight.shape, strict=False)) if a != b]
            if all((other.shape[d], weight.shape[d]) == inner for d in dims):
                if layer not in kept:
                    kept[layer] = _channels(of_target, picked[layer], *inner)
                narrow = other
                for d in dims:
                    narrow = narrow.index_select(d, kept[layer].to(other.device))
                weight.copy_(narrow)
                how = "narrowed"
        counts[how] += 1
    return counts


def _layer(name: str) -> int | None:
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else None


def _channels(weights: dict[str, nn.Parameter], layer: int, size: int, kept: int) -> Tensor:
    """Return the `kept` of `size` channels of a layer's MLP whose input and output weights are largest, ascending."""
    score = torch.ones(size)
    for name, weight in weights.items():
        if _layer(name) == layer and weight.ndim == 2 and size in weight.shape and "gate" not in name:
            score = score * weight.detach().float().cpu().norm(dim=1 - weight.shape.index(size))
    return score.argsort(descending=True, stable=True)[:kept].sort().values


def _components(weight: Tensor, size: int) -> Tensor:
    """Project the rows onto their first `size` principal components."""
    rows = weight.detach().double().cpu()
    basis: Tensor = torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :size]
    return rows @ basis
