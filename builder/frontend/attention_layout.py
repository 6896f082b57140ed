"""Finds a model's attention layout by running the model itself, before its weights are loaded.

The model is created without weights, on torch's meta device, and run once. Functions registered with `transformers`'
attention and mask interfaces record each layer's sizes and which positions are visible. Attention that specbuild cannot
express is refused here, within seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specbuild.runtime.bundle.manifest import CacheShape
from specbuild.runtime.errors import CheckpointError, one_line, shown

from . import portable_rotary
from .hidden_state_taps import decoder_layers
from .token_mixers import replaced

PROBE = "specbuild_probe"
_HARMLESS = {"position_ids", "cache_position"}  # tensors that models pass to their attention, which it can ignore
_FEED_FORWARD = ("mlp", "moe")  # `transformers`' names of layers that mix no tokens
_SINKS = "s_aux"  # transformers' name
_IDS = torch.zeros(1, 3, dtype=torch.int64, device="meta")


@dataclass(frozen=True)
class Attention:
    """One attention of a model, or what else mixes a text's tokens: its cache, and which positions a node sees.

    Attributes:
        cache: Its KV heads, and the sizes of their keys and values.
        window: A node sees so many positions, its own included; 0: all; −c: those of its own chunk of c positions.
        sinks: Whether a learned score for each head takes a part of the weights.
        kind: A convolution has half of a token's numbers as its key, the others as its value; a recurrence has what
            its states are made of.
    """

    cache: CacheShape
    window: int = 0
    sinks: bool = False
    kind: Literal["attention", "convolution", "recurrence"] = "attention"


@dataclass(frozen=True)
class Layout:
    """A model's attentions, in the order in which it computes them.

    `by_layer` tells whether attention i is that of the model's layer i.
    """

    attentions: tuple[Attention, ...]
    by_layer: bool = True

    @classmethod
    def alike(cls, kv_heads: int, head_dim: int, windows: Sequence[int]) -> Layout:
        """Return the layout of layers that differ in their windows alone."""
        return cls(tuple(Attention(CacheShape(kv_heads, head_dim, head_dim), window) for window in windows))

    @property
    def caches(self) -> tuple[CacheShape, ...]:
        """Each attention's cache."""
        return tuple(each.cache for each in self.attentions)

    @property
    def windows(self) -> list[int]:
        """The numbers of positions that a node sees at most, each once; 0: all."""
        return sorted({abs(each.window) for each in self.attentions})

    @property
    def row_values(self) -> int:
        """How many numbers a token has in all caches."""
        return sum(each.heads * (each.key + each.value) for each in self.caches)

    @property
    def state_values(self) -> int:
        """How many numbers the states of a text have."""
        return sum(each.state for each in self.caches)

    @property
    def special(self) -> str | None:
        """The first part of the model that not every backend runs; None if all of them run it."""
        kinds = {
            "layers that keep a state": any(each.kind == "recurrence" for each in self.attentions),
            "convolutions over the text": any(each.kind == "convolution" for each in self.attentions),
            "attention sinks": any(each.sinks for each in self.attentions),
            "attention in chunks": any(each.window < 0 for each in self.attentions),
            "layers whose caches differ": len({*self.caches}) > 1,
            "keys and values of different sizes": any(each.key != each.value for each in self.caches),
        }
        return next((kind for kind, present in kinds.items() if present), None)

    @property
    def record(self) -> dict[str, Any]:
        """The fields that a manifest's record of the model has."""
        return self.spec | {"windows": self.windows, "caches": list(self.spec["caches"])}

    @property
    def spec(self) -> dict[str, Any]:
        """The fields that an executor's description of the model has."""
        first, *others = self.caches
        alike = first.key == first.value and all(each == first for each in others)
        shape = {"layers": len(self.caches), "kv_heads": first.heads, "head_dim": first.key}
        return shape | {"windows": tuple(self.windows), "caches": () if alike else self.caches}


@dataclass
class _Probe:
    """One probing run: its number of positions, and the attentions that it has come to with their layers."""

    positions: int
    attentions: list[tuple[int, Attention]] = field(default_factory=list)
    layer: int | None = None  # the one that runs, if the model has a list of layers

    def note(self, found: Attention, layer: int | None = None) -> None:
        """Note an attention of the layer that runs."""
        default = len(self.attentions) if layer is None else layer
        self.attentions.append((default if self.layer is None else self.layer, found))


_probe = _Probe(0)  # the current run's


@contextmanager
def _probing(model: PreTrainedModel, positions: int) -> Iterator[_Probe]:
    """Yield the record in which the interface functions below note what a model's layers pass to them.

    Raises CheckpointError, with the model's name, for any error inside.
    """
    global _probe
    _probe, name = _Probe(positions), type(model).__name__
    try:
        with torch.no_grad(), _noting_layers(model), _mixers(model):
            portable_rotary.check(model, positions)
            yield _probe
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    except Exception as error:  # a model's code may raise any type
        reason = one_line(error)
        reason = "what it computes depends on values" if "meta tensors" in reason else reason
        raise CheckpointError(f"{name} cannot be exported: {reason}") from None
    finally:
        _probe = _Probe(0)


def probe(config: PreTrainedConfig, positions: int) -> Layout:
    """Return the attention layout of the model that `config` describes, for texts of up to `positions` tokens.

    Raises CheckpointError if specbuild cannot express the model.
    """
    name, model = empty(config)
    every = torch.ones(1, 3, dtype=torch.int64)  # on the CPU, where it has values
    with _probing(model, positions) as run:
        _check_temperature(model.config.get_text_config(), positions)
        logits = model(input_ids=_IDS, position_ids=_IDS, attention_mask=every, use_cache=False).logits
    wanted, attending = config.get_text_config().num_hidden_layers, {layer for layer, _ in run.attentions}
    kinds = getattr(config.get_text_config(), "layer_types", None) or [""] * wanted
    if not {place for place, kind in enumerate(kinds) if kind not in _FEED_FORWARD} <= attending:
        raise CheckpointError(
            f"{name} has {wanted} layers, {len(attending)} of which use transformers' attention interface, a short "
            "convolution or a recurrence that is known: others are not supported"
        )
    if logits.shape[-1] != config.get_text_config().vocab_size:
        raise CheckpointError(f"{name} has a head of {logits.shape[-1]} rows, not one for each token: not supported")
    of_kinds = {each.kind for _, each in run.attentions}
    if "attention" not in of_kinds:
        raise CheckpointError(f"{name} has no layer with attention, beside which states alone are supported")
    plain = of_kinds == {"attention"}
    by_layer = plain and attending == {*range(wanted)} and len(run.attentions) == wanted
    order = sorted(run.attentions, key=lambda each: each[0]) if by_layer else run.attentions
    return Layout(tuple(each for _, each in order), by_layer)


def probe_head(head: PreTrainedModel, positions: int) -> Layout:
    """Return the layout of a head without weights, which is called with tokens, hidden states and positions.

    Raises CheckpointError if specbuild cannot express it.
    """
    with _probing(head, positions) as run:
        head(_IDS, torch.zeros(1, 3, head.config.hidden_size, device="meta"), _IDS)
    return Layout(tuple(each for _, each in run.attentions))


@contextmanager
def _noting_layers(model: PreTrainedModel) -> Iterator[None]:
    """Note which layer of a model runs while inside."""
    with ExitStack() as undo:
        for place, layer in enumerate(decoder_layers(model)):

            def before(_: nn.Module, __: Any, place: int = place) -> None:
                _probe.layer = place

            undo.callback(layer.register_forward_pre_hook(before).remove)
        yield


def _check_temperature(config: PreTrainedConfig, positions: int) -> None:
    """Raise CheckpointError if queries are scaled by a position that the model counts from the step's first token."""
    if getattr(config, "attn_temperature_tuning", False) and positions >= config.floor_scale:
        fits = int(config.floor_scale) - 1
        raise CheckpointError(
            f"its attention scales queries by their position past {fits} tokens: build with --max-seq-len {fits}"
        )


def empty(config: PreTrainedConfig) -> tuple[str, PreTrainedModel]:
    """Return the class name of the model that `config` describes, and the model without weights.

    Raises CheckpointError if its layers or its attention are of an unsupported kind.
    """
    config = copy.deepcopy(config)
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
    if not kind._can_set_attn_implementation():
        raise CheckpointError(
            f"{kind.__name__} has no attention that goes through transformers' attention interface: not supported"
        )


def set_experts(model: PreTrainedModel, implementation: str = "batched_mm") -> str | None:
    """Set how a mixture of experts is computed; the default needs no values of the tensors, which have none here.

    Returns the previous implementation, or None if the model has nothing to set.
    """
    if not model._can_set_experts_implementation():
        return None
    before: str | None = model.config._experts_implementation
    model.set_experts_implementation(implementation)
    return before


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Record what a layer passes to the attention interface, and return an output of the right shape."""
    sinks = take_sinks(module, options)
    cache = CacheShape(key.shape[1], key.shape[3], value.shape[3])
    _probe.note(Attention(cache, _window(attention_mask), sinks is not None), getattr(module, "layer_idx", None))
    batch, heads, nodes, _ = query.shape
    return query.new_empty(batch, nodes, heads, value.shape[3]), None


def _convolution(x: Tensor, _weight: Tensor, _bias: Tensor | None) -> Tensor:
    """Record a convolution, and return an output of the right shape."""
    channels = x.shape[2]
    _probe.note(Attention(CacheShape(1, channels - channels // 2, channels // 2), kind="convolution"))
    return torch.empty_like(x)


def _recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, *, delta: bool) -> Tensor:
    """Record a recurrence, and return an output of the right shape."""
    (heads, columns), row = value.shape[2:], (key, decay, beta)
    cache = CacheShape(1, sum(each[0, 0].numel() for each in row), heads * columns, heads * columns * key.shape[3])
    _probe.note(Attention(cache, kind="recurrence"))
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _mixers(model: PreTrainedModel) -> AbstractContextManager[None]:
    return replaced(model, _convolution, _recurrence)


def take_sinks(module: nn.Module, options: dict[str, Any]) -> Tensor | None:
    """Return the sinks among a layer's options; raise CheckpointError if it asks for more than causal attention."""
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise CheckpointError("its attention looks ahead")
    for option, value in options.items():
        if isinstance(value, Tensor) and option not in _HARMLESS and option != _SINKS:
            raise CheckpointError(f"its attention takes {option}, which is not supported")
    sinks: Tensor | None = options.get(_SINKS)
    return sinks


def _mask(mask_function: Callable[..., Tensor], **_: Any) -> Tensor:
    """Return which positions a few sample queries see, as the mask interface: `bool[1, 1, few, positions]`."""
    zero, queries = torch.zeros(1, dtype=torch.int64), _queries(_probe.positions)
    with _Unpadded():
        visible = mask_function(zero, zero, queries[:, None], torch.arange(_probe.positions)[None])
    return visible.expand(len(queries), _probe.positions)[None, None]


class _Unpadded(TorchFunctionMode):
    """Takes 0 for every tensor without values: how many tokens pad a text's beginning."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        args, kwargs = tree_map_only(Tensor, _unpadded, (args, kwargs or {}))
        return function(*args, **kwargs)


def _unpadded(x: Tensor) -> Tensor:
    return torch.zeros_like(x, device="cpu") if x.is_meta else x


def _queries(positions: int) -> Tensor:
    last = positions - 1
    return torch.tensor([last, last - 1, last * 2 // 3, last // 2, last // 3, 0]).clamp(min=0)


def _window(visible: Tensor | None) -> int:
    """Return a mask's window, as `Attention` has it; raise CheckpointError for other masks."""
    if visible is None:
        return 0
    if visible.is_meta or visible.dtype != torch.bool or visible.shape[-2] != len(_queries(2)):
        raise CheckpointError("it makes its attention mask by itself, which is not supported")
    rows, keys = visible[0, 0], torch.arange(visible.shape[-1])
    queries = _queries(len(keys))[:, None]
    distance = queries - keys
    width = int(rows[0].sum())
    if torch.equal(rows, (distance >= 0) & (distance < width)):
        return width if width < len(keys) else 0
    starts = sorted({int(row.nonzero()[0]) for row in rows if row.any()})
    for chunk in range(1, len(keys)) if len(starts) > 1 else ():
        if torch.equal(rows, (distance >= 0) & (queries // chunk == keys // chunk)):
            return -chunk
    raise CheckpointError("its attention mask is neither causal nor a sliding window nor chunks")


ALL_ATTENTION_FUNCTIONS.register(PROBE, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, _mask)
