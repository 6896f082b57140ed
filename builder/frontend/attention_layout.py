"""Finds a model's attention layout by running the model itself, before its weights are loaded.

The model is created without weights, on torch's meta device, and run once. Functions registered with `transformers`'
attention and mask interfaces record each layer's sizes and which positions are visible. Attention that specbuild cannot
express is refused here, within seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specbuild.runtime.errors import CheckpointError, one_line, shown

from . import portable_rotary

PROBE = "specbuild_probe"
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
_HARMLESS = {"position_ids", "cache_position"}  # tensors that models pass to their attention, which it can ignore


@dataclass(frozen=True)
class Layout:
    """The shape of the KV caches, and each layer's window: how many positions a node sees (0: all)."""

    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]

    @property
    def layers(self) -> int:
        """Number of layers, each of which has a KV cache."""
        return len(self.windows)


@dataclass
class _Layer:
    """The arguments that one layer passed to the attention interface."""

    index: int
    kv_heads: int
    head_dim: int
    value_dim: int
    visible: Tensor | None


@dataclass
class _Probe:
    """One probing run: its number of positions, and what the layers passed to the attention interface."""

    positions: int
    layers: list[_Layer] = field(default_factory=list)


_probe = _Probe(0)  # the current run's


@contextmanager
def _probing(positions: int) -> Iterator[list[_Layer]]:
    """Yield the list in which the interface functions below record what a model's layers pass to them."""
    global _probe
    _probe = _Probe(positions)
    try:
        yield _probe.layers
    finally:
        _probe = _Probe(0)


def probe(config: PreTrainedConfig, positions: int) -> Layout:
    """Return the attention layout of the model that `config` describes, for texts of up to `positions` tokens.

    Raises CheckpointError if specbuild cannot express the model.
    """
    name, model = empty(config)
    try:
        with torch.no_grad(), _probing(positions) as asked:
            portable_rotary.check(model, positions)
            ids = torch.zeros(1, 3, dtype=torch.int64, device="meta")
            logits = model(input_ids=ids, position_ids=ids, attention_mask=ids, use_cache=False).logits
            layers = sorted(asked, key=lambda layer: layer.index)
            windows = tuple(_window(layer.visible) for layer in layers)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    except Exception as error:  # a model's code may raise any type
        reason = one_line(error)
        reason = "what it computes depends on values" if "meta tensors" in reason else reason
        raise CheckpointError(f"{name} cannot be exported: {reason}") from None
    wanted = config.get_text_config().num_hidden_layers
    if [layer.index for layer in layers] != list(range(wanted)):
        raise CheckpointError(
            f"{name} has {wanted} layers, {len(layers)} of which use transformers' attention interface: recurrent and "
            "custom layers are not supported"
        )
    shapes = {(layer.kv_heads, layer.head_dim, layer.value_dim) for layer in layers}
    if len(shapes) > 1 or layers[0].head_dim != layers[0].value_dim:
        raise CheckpointError(f"{name} has keys and values of different sizes: not supported")
    if logits.shape[-1] != config.get_text_config().vocab_size:
        raise CheckpointError(f"{name} has a head of {logits.shape[-1]} rows, not one for each token: not supported")
    return Layout(layers[0].kv_heads, layers[0].head_dim, windows)


def empty(config: PreTrainedConfig) -> tuple[str, PreTrainedModel]:
    """Return the class name of the model that `config` describes, and the model without weights.

    Raises CheckpointError if its layers or its attention are of an unsupported kind.
    """
    config = copy.deepcopy(config)
    others = sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - _LAYER_TYPES)
    if others:
        raise CheckpointError(f"{config.model_type!r} models with {others[0]} layers are not supported")
    check_interface(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=PROBE)
    except Exception as error:  # a model's code may raise any type
        reason = one_line(error)
        if PROBE in reason or "attention implementation" in reason:
            reason = "its attention does not go through transformers' attention interface"
        raise CheckpointError(f"{config.model_type!r} models cannot be exported: {reason}") from None
    set_experts(model)
    return type(model).__name__, model


def check_decoder(source: str, config: PreTrainedConfig) -> None:
    """Raise CheckpointError unless the model is a text-only decoder that uses the attention interface."""
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(
            f"{source} is a {shown(config.model_type)} model: specbuild takes decoder-only language models"
        )
    check_interface(config)
    if config.get_text_config() is not config:
        raise CheckpointError(
            f"{source} is a {shown(config.model_type)} model, of more than text: give its language model alone"
        )


def check_interface(config: PreTrainedConfig) -> None:
    """Raise CheckpointError if the model's class does not use the attention interface."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not kind._supports_attention_backend:
        raise CheckpointError(
            f"{kind.__name__} has no attention that goes through transformers' attention interface: not supported"
        )


def set_experts(model: PreTrainedModel, implementation: str = "batched_mm") -> str | None:
    """Set how a mixture of experts is computed; the default, matmuls of gathered weights, can be exported.

    Returns the previous implementation, or None if the model has nothing to set.
    """
    if not model._can_set_experts_implementation():
        return None
    before: str | None = model.config._experts_implementation
    model.set_experts_implementation(implementation)
    return before


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Record what a layer passes to the attention interface, and return an output of the right shape."""
    refuse_options(module, options)
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise CheckpointError("its attention does not say which layer it belongs to")
    _probe.layers.append(_Layer(index, key.shape[1], key.shape[3], value.shape[3], mask))
    batch, heads, nodes, _ = query.shape
    return query.new_empty(batch, nodes, heads, value.shape[3]), None


def refuse_options(module: nn.Module, options: dict[str, Any]) -> None:
    """Raise CheckpointError if a layer asks for anything beyond plain causal attention."""
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise CheckpointError("its attention looks ahead")
    for option, value in options.items():
        if isinstance(value, Tensor) and option not in _HARMLESS:
            raise CheckpointError(f"its attention takes {option}, which is not supported")


def _mask(mask_function: Callable[..., Tensor], **_: Any) -> Tensor:
    """Return which positions a few sample queries see, as the mask interface: `bool[1, 1, few, positions]`."""
    zero, queries = torch.zeros(1, dtype=torch.int64), _queries(_probe.positions)
    visible = mask_function(zero, zero, queries[:, None], torch.arange(_probe.positions)[None])
    return visible.expand(len(queries), _probe.positions)[None, None]


def _queries(positions: int) -> Tensor:
    last = positions - 1
    return torch.tensor([last, last - 1, last * 2 // 3, last // 2, last // 3, 0]).clamp(min=0)


def _window(visible: Tensor | None) -> int:
    """Return a mask's window, 0 if all earlier positions are visible; raise CheckpointError for any other mask."""
    if visible is None:
        return 0
    if visible.is_meta or visible.dtype != torch.bool or visible.shape[-2] != len(_queries(2)):
        raise CheckpointError("it makes its attention mask by itself, which is not supported")
    rows, keys = visible[0, 0], torch.arange(visible.shape[-1])
    queries = _queries(len(keys))
    distance = queries[:, None] - keys
    width = int(rows[0].sum())
    if not torch.equal(rows, (distance >= 0) & (distance < width)):
        raise CheckpointError("its attention mask is neither causal nor a sliding window")
    return width if width < len(keys) else 0


ALL_ATTENTION_FUNCTIONS.register(PROBE, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, _mask)
