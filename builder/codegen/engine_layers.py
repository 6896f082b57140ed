"""Summarizes a compiled network's layers, for the build's report and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# TensorRT's layer types for the parts of attention. The lowerings name these nodes `part.layer`, as in "attention.3".
ROLES = {
    "attention": ("ATTENTION_INPUT", "PLUGIN_V3"),
    "kv_cache_update": ("KV_CACHE_UPDATE",),
    "rotary_embedding": ("ROTARY_EMBEDDING",),
}


def describe(layers: Sequence[tuple[str, str]], count: int) -> dict[str, Any]:
    """Return the report's entry on a network's layers: all of them, a count by type, and attention's by model layer.

    Args:
        layers: Name and type of each of the network's layers.
        count: How many layers the model has.
    """
    types = [kind for _, kind in layers]
    by_layer: list[dict[str, list[str]]] = [{role: [] for role in ROLES} for _ in range(count)]
    for name, kind in layers:
        role = next((role for role, wanted in ROLES.items() if kind in wanted), None)
        number = name.split(".")[1].split("_")[0] if role and "." in name else ""
        if role and number.isdigit() and int(number) < count:
            by_layer[int(number)][role].append(name)
    return {
        "layers": [{"name": name, "type": kind} for name, kind in layers],
        "layer_types": {kind: types.count(kind) for kind in sorted(set(types))},
        "model_layers": [{"layer": number} | found for number, found in enumerate(by_layer)],
    }


def in_words(engine: dict[str, Any]) -> str:
    """Describe an entry, as in "574 layers; of the model's 6: attention in 6, KV-cache update in 6, …".

    Quantized weights and inputs are counted too: a weight has a DEQUANTIZE, an input a QUANTIZE and a DEQUANTIZE.
    """
    of = engine["model_layers"]
    found = {
        role.replace("_", " ").replace("kv cache", "KV-cache"): sum(bool(each[role]) for each in of) for role in ROLES
    }
    roles = ", ".join(f"{role} in {count}" for role, count in found.items())
    inputs, restored = (engine["layer_types"].get(kind, 0) for kind in ("QUANTIZE", "DEQUANTIZE"))
    quantized = f"; {restored - inputs} quantized weights" if restored else ""
    rounded = f", {inputs} quantized inputs" if inputs else ""
    return f"{len(engine['layers'])} layers; of the model's {len(of)}: {roles}{quantized}{rounded}"
