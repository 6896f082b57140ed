"""Estimates the memory of a build from its checkpoints' headers, by what it is used for at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from .config.build_config import BuildConfig
from .frontend.checkpoint import Checkpoint
from .frontend.draft_head import HeadCheckpoint
from .frontend.layer_by_layer import LOGITS
from .frontend.lazy_weights import Weight
from .quantize.texts import HELD_OUT, LENGTH

# Measured: what the libraries take, by whether engines are compiled, and then bytes per parameter of the whole model.
BASE_BYTES = {False: 700 << 20, True: 950 << 20}
WHOLE_BYTES, ENGINE_BYTES = 18, 11
# Bytes per number of a weight at its peak: packed from blocks or quantized; read, turned and written in another type.
BLOCK_BYTES, FLOAT_BYTES = 5, {"fp32": 14, "fp16": 8, "bf16": 8}
LAYER_BYTES = 16  # per number of the largest layer while it is calibrated: its weights, their copies, and their codes
LOGIT_BYTES = 24  # per logit of the texts that are held at once: before, after, in float64, and what malloc keeps
CHECK_TOKENS = 280  # of the check's texts together
Uses = dict[str, int]


def building_memory(config: BuildConfig, name: str, model: Checkpoint | HeadCheckpoint) -> Uses:
    """Return the bytes at the peak of making one model, by use, beside the libraries and before its bundle's check.

    Args:
        config: The build's options.
        name: "target" or "draft".
        model: The model's checkpoint.
    """
    tensors = model.tensors if isinstance(model, Checkpoint) else None
    if config.descriptor.compiles:
        return {f"the {name} in its engine's builder": ENGINE_BYTES * model.parameters}
    if tensors is None:
        return {f"the whole {name}": WHOLE_BYTES * model.parameters}
    return max(_writes(config, name, tensors), _runs(config, model.config.vocab_size, tensors), key=_sum)


def held_out_tokens(config: BuildConfig) -> int:
    """Return how many tokens the held-out texts have at most."""
    return -(-config.quantize.calib_size // HELD_OUT) * LENGTH


def _sum(uses: Uses) -> int:
    return sum(uses.values())


def _writes(config: BuildConfig, name: str, tensors: Mapping[str, Weight]) -> Uses:
    """Return what it takes to write the weight that takes most."""
    kept, scheme = config.keeps(name), config.scheme_of(name)
    blocks = kept or scheme is None or scheme.quantized
    written = FLOAT_BYTES[config.dtype_of(name)]
    each = {key: _work(weight, blocks, kept, written) for key, weight in tensors.items()}
    largest = max(each, key=each.__getitem__)
    return {f"work on the {name}'s largest weight, {largest}": each[largest]}


def _work(weight: Weight, blocks: bool, kept: bool, written: int) -> int:
    quantized = blocks and len(weight.shape) > 1 and (bool(weight.format) or not kept)
    return (BLOCK_BYTES if quantized else written) * prod(weight.shape)


def _runs(config: BuildConfig, vocab_size: int, tensors: Mapping[str, Weight]) -> Uses:
    """Return what it takes to run the float32 model a layer at a time: nothing if only the bundle's check does."""
    if not config.quantizes and not config.descriptor.on_gpu:
        return {}
    layers = dict[str, int]()
    for key, weight in tensors.items():
        layer = next((part for part in key.split(".") if part.isdigit()), "")
        layers[layer] = layers.get(layer, 0) + prod(weight.shape) * bool(layer)
    logits = CHECK_TOKENS * vocab_size
    if config.quantizes:
        logits = min(held_out_tokens(config) * vocab_size, max(LOGITS, LENGTH * vocab_size))
    return {"a layer": LAYER_BYTES * max(layers.values()), "logits of texts": LOGIT_BYTES * logits}
