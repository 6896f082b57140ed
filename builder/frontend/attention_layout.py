"""What a model's attention looks like, asked of the model itself before its weights are loaded.

The model is made without weights, on torch's meta device, and run once. `transformers`' attention interface tells what
each layer asks for, its mask interface who may see whom; what specbuild cannot express is refused here, in seconds.
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
_HARMLESS = {"position_ids", "cache_position"}  # tensors a model hands to its attention, which need none of them


@dataclass(frozen=True)
class Layout:
    """The caches' shape, and per layer how many positions a node sees (0: all)."""

    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]

    @property
    def layers(self) -> int:
        """How many layers have a cache."""
        return len(self.windows)


@dataclass
class _Layer:
    """What one layer asked of the attention interface."""

    index: int
    kv_heads: int
    head_dim: int
    value_dim: int
    visible: Tensor | None


@dataclass
class _Probe:
    """One look at a model: for how many positions, and what its layers asked."""

    positions: int
    layers: list[_Layer] = field(default_factory=list)


_probe = _Probe(0)  # of nothing


@contextmanager
def _probing(positions: int) -> Iterator[list[_Layer]]:
    """While inside, what a model's layers ask of the interfaces below is noted in the list."""
    global _probe
    _probe = _Probe(positions)
    try:
        yield _probe.layers
    finally:
        _probe = _Probe(0)


def probe(config: PreTrainedConfig, positions: int) -> Layout:
    """The layout of the model that `config` describes, for texts of `positions` tokens; raises CheckpointError."""
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
    except Exception as error:  # a model's code raises whatever it likes
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
    """The model without weights, and its class's name."""
    config = copy.deepcopy(config)
    others = sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - _LAYER_TYPES)
    if others:
        raise CheckpointError(f"{config.model_type!r} models with {others[0]} layers are not supported")
    check_interface(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=PROBE)
    except Exception as error:  # a model's code raises whatever it likes
        reason = one_line(error)
        if PROBE in reason or "attention implementation" in reason:
            reason = "its attention does not go through transformers' attention interface"
        raise CheckpointError(f"{config.model_type!r} models cannot be exported: {reason}") from None
    set_experts(model)
    return type(model).__name__, model


def check_decoder(source: str, config: PreTrainedConfig) -> None:
    """Raises CheckpointError for a model that is no decoder of text alone."""
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
    """Raises CheckpointError where the model's class does not use the attention interface."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not kind._supports_attention_backend:
        raise CheckpointError(
            f"{kind.__name__} has no attention that goes through transformers' attention interface: not supported"
        )


def set_experts(model: PreTrainedModel, implementation: str = "batched_mm") -> str | None:
    """Let a mixture of experts run as products of gathered weights, which export; the implementation before."""
    if not model._can_set_experts_implementation():
        return None
    before: str | None = model.config._experts_implementation
    model.set_experts_implementation(implementation)
    return before


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The attention interface's function: notes what a layer asks for."""
    refuse_options(module, options)
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise CheckpointError("its attention does not say which layer it belongs to")
    _probe.layers.append(_Layer(index, key.shape[1], key.shape[3], value.shape[3], mask))
    batch, heads, nodes, _ = query.shape
    return query.new_empty(batch, nodes, heads, value.shape[3]), None


def refuse_options(module: nn.Module, options: dict[str, Any]) -> None:
    """Raises CheckpointError for anything beyond plain causal attention that a layer asks for."""
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise CheckpointError("its attention looks ahead")
    for option, value in options.items():
        if isinstance(value, Tensor) and option not in _HARMLESS:
            raise CheckpointError(f"its attention takes {option}, which is not supported")


def _mask(mask_function: Callable[..., Tensor], **_: Any) -> Tensor:
    """The mask interface's function: who is visible from a few positions, `bool[1, 1, few, positions]`."""
    zero, queries = torch.zeros(1, dtype=torch.int64), _queries(_probe.positions)
    visible = mask_function(zero, zero, queries[:, None], torch.arange(_probe.positions)[None])
    return visible.expand(len(queries), _probe.positions)[None, None]


def _queries(positions: int) -> Tensor:
    last = positions - 1
    return torch.tensor([last, last - 1, last * 2 // 3, last // 2, last // 3, 0]).clamp(min=0)


def _window(visible: Tensor | None) -> int:
    """The window of a mask, 0 where all earlier positions are visible; raises CheckpointError for any other mask."""
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
