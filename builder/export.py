"""Export of a Hugging Face causal LM to the portable graph.

Nothing here knows a model family. Three of `transformers`' own seams are used: the attention interface (one
`specbuild::TreeAttention` per layer), the module-level `apply_rotary_pos_emb` of a modeling file with the rotary
embedding module that feeds it (cosines and sines become a table of positions), and the RMSNorm modules. What does not
look as expected at a seam is left as `transformers` computes it.

Inputs of the portable graph: input_ids, position_ids `int64[B, N]`; parents `int32[B, M]`, the whole tree;
cache_len, tree_offset `int32[B]`, committed rows and tree nodes that are in the cache already; logit_nodes
`int64[L]`, the nodes whose logits are wanted; past_key.i, past_value.i `[B, Hkv, S, D]`. Outputs: logits `[B, L, V]`,
present_key.i, present_value.i.
"""

from __future__ import annotations

import contextlib
import io
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..runtime.errors import CheckpointError
from .ops import OPSET, TRANSLATIONS

ATTENTION = "specbuild"


@dataclass(frozen=True)
class Shapes:
    """What the graph's caches look like."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> Shapes:
        """Read from the configuration."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, head_dim)


@dataclass
class _Call:
    """The tensors one forward pass hands to every layer's attention, and the caches it hands back."""

    past: list[Tensor]
    parents: Tensor
    cache_len: Tensor
    tree_offset: Tensor
    present: list[Tensor] = field(default_factory=list)


_call: _Call | None = None


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """The attention interface's function: hands a layer's q, k, v to `specbuild::tree_attention`."""
    unsupported = [name for name in ("sliding_window", "softcap", "s_aux") if options.get(name) is not None]
    if unsupported:
        raise CheckpointError(f"the model's attention uses {unsupported[0]}, which specbuild does not export")
    assert _call is not None, "specbuild's attention runs inside PortableModel only"
    layer: int = module.layer_idx  # type: ignore[assignment]
    out, new_key, new_value = torch.ops.specbuild.tree_attention(
        query,
        key,
        value,
        _call.past[2 * layer],
        _call.past[2 * layer + 1],
        _call.parents,
        _call.cache_len,
        _call.tree_offset,
        scaling,
    )
    _call.present += [new_key, new_value]
    return out, None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


class PortableModel(nn.Module):
    """A causal LM with the portable graph's inputs and outputs."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        parents: Tensor,
        cache_len: Tensor,
        tree_offset: Tensor,
        logit_nodes: Tensor,
        past: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """See the module's docstring for shapes."""
        global _call
        _call = call = _Call(past, parents, cache_len, tree_offset)
        try:
            output = self.model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=logit_nodes
            )
        finally:
            _call = None
        return output.logits, call.present


class RotaryTable(nn.Module):
    """A rotary embedding as a table of its first `positions` rows: cos and sin `[positions, R/2]`."""

    def __init__(self, embedding: nn.Module, positions: int) -> None:
        super().__init__()
        first = embedding(torch.zeros(1), torch.arange(4)[None])
        cos, sin = embedding(torch.zeros(1), torch.arange(positions)[None])
        if not (torch.equal(cos[:, :4], first[0]) and torch.equal(sin[:, :4], first[1])):
            raise CheckpointError("the model's rope scaling depends on the length of the text: not supported")
        half = cos.shape[-1] // 2
        self.register_buffer("cos", cos[0, :, :half].contiguous())
        self.register_buffer("sin", sin[0, :, :half].contiguous())

    def forward(self, _x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at `position_ids [B, N]`: `[B, N, R/2]` each."""
        cos, sin = self.get_buffer("cos"), self.get_buffer("sin")
        return nn.functional.embedding(position_ids, cos), nn.functional.embedding(position_ids, sin)


@contextmanager
def portable(model: PreTrainedModel, positions: int) -> Iterator[PortableModel]:
    """The model with specbuild's operators swapped in at the three seams, as it was afterwards."""
    undo = contextlib.ExitStack()
    with undo:
        attention = model.config._attn_implementation
        undo.callback(model.set_attn_implementation, attention)
        model.set_attn_implementation(ATTENTION)
        _swap_rotary(model, positions, undo)
        _swap_norms(model, undo)
        yield PortableModel(model).eval()


def _swap_rotary(model: PreTrainedModel, positions: int, undo: contextlib.ExitStack) -> None:
    """Tables for the rotary embeddings, one operator for each rotation."""
    modeling = sys.modules[type(model).__module__]
    base = model.base_model
    embedding = getattr(base, "rotary_emb", None)
    original = getattr(modeling, "apply_rotary_pos_emb", None)
    if embedding is None or original is None or not _rotates_halves(original):
        raise CheckpointError(f"{type(model).__name__} does not place its positions with rotary halves: not supported")
    base.rotary_emb = RotaryTable(embedding, positions)
    undo.callback(setattr, base, "rotary_emb", embedding)

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return torch.ops.specbuild.rotary(q, cos, sin), torch.ops.specbuild.rotary(k, cos, sin)

    modeling.apply_rotary_pos_emb = apply  # type: ignore[attr-defined]
    undo.callback(setattr, modeling, "apply_rotary_pos_emb", original)


def _rotates_halves(function: Any) -> bool:
    """Whether a model's own rotation computes what `specbuild::rotary` does, tried on random input."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 3, 8, generator=generator) for _ in range(2))
    cos, sin = (torch.randn(1, 3, 4, generator=generator) for _ in range(2))
    try:
        theirs = function(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    except (TypeError, RuntimeError):
        return False
    return all(
        torch.allclose(mine, other, atol=1e-6)
        for mine, other in zip((torch.ops.specbuild.rotary(x, cos, sin) for x in (q, k)), theirs, strict=True)
    )


def _swap_norms(model: PreTrainedModel, undo: contextlib.ExitStack) -> None:
    """One operator for each RMSNorm whose function, tried on random input, is x · rsqrt(mean x² + ε) · weight."""
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not type(module).__name__.endswith("RMSNorm") or eps is None:
            continue
        sample = torch.randn(2, 3, module.weight.shape[0], generator=torch.Generator().manual_seed(0))
        if torch.allclose(module(sample), torch.ops.specbuild.rms_norm(sample, module.weight, eps), atol=1e-5):
            module.forward = types.MethodType(_norm_forward(eps), module)
            undo.callback(delattr, module, "forward")


def _norm_forward(eps: float) -> Any:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return torch.ops.specbuild.rms_norm(x, self.weight, eps)  # type: ignore[no-any-return]

    return forward


def export(model: PreTrainedModel, positions: int) -> ir.Model:
    """The portable graph; `positions`: rows of the rotary table, so the cache's capacity. Raises CheckpointError."""
    shapes = Shapes.of(model)
    past = [f"past_{kind}.{layer}" for layer in range(shapes.layers) for kind in ("key", "value")]
    batch, nodes, tree, wanted, capacity = (
        2,
        3,
        5,
        2,
        7,
    )  # any sizes but 0 and 1, which torch.export takes for constants
    dim = torch.export.Dim
    b, n, m, w, s = dim("batch"), dim("nodes"), dim("tree"), dim("logit_nodes"), dim("capacity")
    cache = torch.zeros(batch, shapes.kv_heads, capacity, shapes.head_dim)
    example = (
        torch.zeros(batch, nodes, dtype=torch.int64),
        torch.zeros(batch, nodes, dtype=torch.int64),
        torch.full((batch, tree), -1, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32),
        torch.arange(wanted),
        [cache.clone() for _ in past],
    )
    dynamic = ({0: b, 1: n}, {0: b, 1: n}, {0: b, 1: m}, {0: b}, {0: b}, {0: w}, [{0: b, 2: s} for _ in past])
    with portable(model, positions) as module, torch.no_grad(), _quiet(), _explained(model):
        program = torch.onnx.export(
            module,
            example,
            dynamo=True,
            dynamic_shapes=dynamic,
            opset_version=OPSET,
            custom_translation_table=TRANSLATIONS,
            input_names=["input_ids", "position_ids", "parents", "cache_len", "tree_offset", "logit_nodes", *past],
            output_names=["logits", *(name.replace("past", "present") for name in past)],
            optimize=True,
            verbose=False,
        )
    assert program is not None
    attentions = sum(node.op_type == "TreeAttention" for node in program.model.graph)
    if attentions != shapes.layers:
        raise CheckpointError(
            f"{type(model).__name__} has {shapes.layers} layers but exported {attentions} attentions: "
            "its layers do not all use transformers' attention interface"
        )
    return program.model


@contextmanager
def _explained(model: PreTrainedModel) -> Iterator[None]:
    """The exporter's errors in one line; our own, which it wraps, as they were."""
    try:
        yield
    except Exception as error:  # torch.export raises many unrelated types
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, CheckpointError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise cause from None
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise CheckpointError(f"{type(model).__name__} cannot be exported by torch.onnx: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks to its own developers."""
    import logging

    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
