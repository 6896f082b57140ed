"""A compiled network's layers: what a build keeps of them, and how they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What attention becomes, by TensorRT's type; the lowerings name these nodes `role.layer`.
ROLES = {"attention": "ATTENTION_INPUT", "kv_cache_update": "KV_CACHE_UPDATE", "rotary_embedding": "ROTARY_EMBEDDING"}


def describe(layers: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A network's layers for the report: all, how many of each type, and by model layer those that attention became."""
    types = [kind for _, kind in layers]
    by_layer: dict[int, dict[str, list[str]]] = {}
    for name, kind in layers:
        role = next((role for role, wanted in ROLES.items() if kind == wanted), None)
        number = name.split(".")[1].split("_")[0] if role and "." in name else ""
        if role and number.isdigit():
            by_layer.setdefault(int(number), {r: [] for r in ROLES})[role].append(name)
    return {
        "layers": [{"name": name, "type": kind} for name, kind in layers],
        "layer_types": {kind: types.count(kind) for kind in sorted(set(types))},
        "model_layers": [{"layer": number} | by_layer[number] for number in sorted(by_layer)],
    }


def in_words(engine: dict[str, Any]) -> str:
    """ "312 layers; attention, KV-cache update and rotary embedding in all 6 of the model's"."""
    found = [
        role.replace("_", " ").replace("kv cache", "KV-cache")
        for role in ROLES
        if all(each[role] for each in engine["model_layers"])
    ]
    return f"{len(engine['layers'])} layers; {', '.join(found)} in all {len(engine['model_layers'])} of the model's"
