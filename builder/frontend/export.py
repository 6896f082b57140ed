"""Export of a Hugging Face causal LM to the portable graph.

No code here is specific to a model family. specbuild's operators enter a model in two places: through `transformers`'
attention interface (one `specbuild::TreeAttention` per layer) and in place of the rotary embedding
(`portable_rotary`). All else is exported as `transformers` computes it; passes find norms and activations in the graph.

Inputs of the portable graph: input_ids, position_ids `int64[B, N]`; parents `int32[B, M]`, the whole tree;
cache_len, tree_offset `int32[B]`, the numbers of committed rows and of tree nodes that are already in the cache;
logit_nodes `int64[L]`, the nodes whose logits are computed; past_key.i, past_value.i `[B, Hkv, S, D]`. Outputs: logits
`[B, L, V]`, present_key.i, present_value.i.

A target for a head also has the output hidden `[B, N, H]`: what EAGLE-3's `fc` fuses from the hidden states of some
layers, or MTP's last hidden state. The head has that output too, and the input hidden_in `[B, N, H]`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specbuild.runtime.errors import CheckpointError

from . import portable_rotary
from .attention_layout import Layout, set_experts, take_sinks
from .draft_head import DraftHead
from .experts import EXPERTS, own_experts
from .hidden_state_taps import Taps
from .lazy_weights import Weight, of_model
from .portable_ops import OPSET, TRANSLATIONS
from .quiet import only_errors
from .simplification import name_weights, simplify
from .token_mixers import replaced

ATTENTION = "specbuild"


@dataclass
class _Call:
    """The tensors that one forward pass hands to every layer's attention, and the caches that it returns."""

    layout: Layout
    past: list[Tensor]
    place: list[Tensor]  # position_ids, parents, cache_len, tree_offset
    present: list[Tensor] = field(default_factory=list)


_call: _Call | None = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Pass a layer's query, key and value from the attention interface to `specbuild::tree_attention`."""
    sinks = take_sinks(module, options)
    assert _call is not None, "specbuild's attention runs inside PortableModel only"
    at: int = module.layer_idx if _call.layout.by_layer else len(_call.present) // 2  # type: ignore[assignment]
    layout = _call.layout.attentions[at]
    out, new_key, new_value = torch.ops.specbuild.tree_attention(
        query,
        key,
        value,
        _call.past[2 * at : 2 * at + 2],
        _call.place,
        sinks,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        layout.window,
        softcap or 0.0,
    )
    _call.present += [new_key, new_value]
    return out, None


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Pass a convolution's input to `specbuild::tree_convolution`."""
    assert _call is not None, "specbuild's convolution runs inside PortableModel only"
    at = len(_call.present)
    found: list[Tensor] = torch.ops.specbuild.tree_convolution(x, weight, bias, _call.past[at : at + 2], _call.place)
    _call.present += found[1:]
    return found[0]


def _recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, *, delta: bool) -> Tensor:
    """Pass what changes states to `specbuild::tree_recurrence`."""
    assert _call is not None, "specbuild's recurrence runs inside PortableModel only"
    at = len(_call.present)
    found: list[Tensor] = torch.ops.specbuild.tree_recurrence(
        query, key, value, decay, beta, _call.past[at : at + 2], _call.place, delta
    )
    _call.present += found[1:]
    return found[0]


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


class PortableModel(nn.Module):
    """A causal LM or a head with the portable graph's inputs and outputs; `taps` are those of a target."""

    def __init__(self, model: PreTrainedModel, layout: Layout, taps: Taps | None = None) -> None:
        super().__init__()
        self.model, self.layout, self.taps = model, layout, taps
        self.fuse = taps.fuse if taps else None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        parents: Tensor,
        cache_len: Tensor,
        tree_offset: Tensor,
        logit_nodes: Tensor,
        past: list[Tensor],
        hidden_in: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the logits, and a list of hidden states (if any) and caches; the module's docstring has the shapes."""
        global _call
        _call = call = _Call(self.layout, past, [position_ids, parents, cache_len, tree_offset])
        try:
            if hidden_in is not None:
                logits, hidden = self.model(input_ids, hidden_in, position_ids, logits_to_keep=logit_nodes)
                return logits, [hidden, *call.present]
            logits = self.model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=logit_nodes
            ).logits
        finally:
            _call = None
        hidden = [self.fuse(self.taps.states())] if self.taps and self.fuse else []
        return logits, [*hidden, *call.present]


@contextmanager
def portable(
    model: PreTrainedModel, layout: Layout, positions: int, capacity: int, taps: Taps | None = None
) -> Iterator[PortableModel]:
    """Yield the model with specbuild's operators swapped in, and restore it afterwards; arguments as for `export`."""
    undo = contextlib.ExitStack()
    with undo:
        if taps:
            undo.enter_context(taps.watching(model))
        undo.callback(model.set_attn_implementation, model.config._attn_implementation)
        model.set_attn_implementation(ATTENTION)
        if experts := set_experts(model, EXPERTS):
            undo.callback(set_experts, model, experts)
        undo.enter_context(own_experts(model))
        portable_rotary.swap(model, positions, capacity, undo)
        undo.enter_context(replaced(model, _convolution, _recurrence))
        undo.callback(model.train, model.training)
        yield PortableModel(model, layout, taps).eval()


def export(
    model: PreTrainedModel,
    layout: Layout,
    positions: int,
    capacity: int,
    taps: Taps | None = None,
    weights: Mapping[str, Weight] | None = None,
) -> ir.Model:
    """Export a model to the portable graph, whose initializers are recipes: weights are read when they are written.

    Args:
        model: A causal LM, or a head.
        layout: The model's attention layout.
        positions: Maximum number of tokens in a text.
        capacity: Rows of a KV cache, at least `positions`.
        taps: The hidden states that a head reads from this target; None without a head.
        weights: The model's weights by name; None: those that it holds.

    Raises:
        CheckpointError: The exporter cannot handle the model.
    """
    with portable(model, layout, positions, capacity, taps) as module, torch.no_grad(), _quiet(), _explained(model):
        program = _traced(module)
        name_weights(program.graph, of_model(model) if weights is None else weights)
        simplify(program)
    return program


def _example(layout: Layout) -> tuple[Any, ...]:
    """Inputs of any sizes but 0 and 1, which torch.export takes for constants."""
    batch, nodes, tree, wanted, rows = 2, 3, 5, 2, 7
    sizes = [(each.heads, size) for each in layout.caches for size in (each.key, each.value)]
    return (
        torch.zeros(batch, nodes, dtype=torch.int64),
        torch.zeros(batch, nodes, dtype=torch.int64),
        torch.full((batch, tree), -1, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int32),
        torch.arange(wanted),
        [torch.zeros(batch, heads, rows, size) for heads, size in sizes],
    )


def _traced(module: PortableModel) -> ir.Model:
    """Return the graph as torch traces it."""
    layout, model = module.layout, module.model
    example: tuple[Any, ...] = _example(layout)
    past = [f"past_{kind}.{layer}" for layer in range(len(layout.attentions)) for kind in ("key", "value")]
    dim = torch.export.Dim
    b, n, m, w, s = dim("batch"), dim("nodes"), dim("tree"), dim("logit_nodes"), dim("capacity")
    dynamic: Any = ({0: b, 1: n}, {0: b, 1: n}, {0: b, 1: m}, {0: b}, {0: b}, {0: w}, [{0: b, 2: s} for _ in past])
    head = isinstance(model, DraftHead)
    if head:
        state = torch.zeros(*example[0].shape, model.config.hidden_size)
        example, dynamic = (*example, state), (*dynamic, {0: b, 1: n})
    hidden = ["hidden"] if head or module.taps else []
    names = ["input_ids", "position_ids", "parents", "cache_len", "tree_offset", "logit_nodes", *past]
    program = torch.onnx.export(
        module,
        example,
        dynamo=True,
        dynamic_shapes=dynamic,
        opset_version=OPSET,
        custom_translation_table=TRANSLATIONS,
        input_names=[*names, *(["hidden_in"] if head else [])],
        output_names=["logits", *hidden, *(name.replace("past", "present") for name in past)],
        optimize=False,
        verbose=False,
    )
    assert program is not None
    return program.model


@contextmanager
def _explained(model: PreTrainedModel) -> Iterator[None]:
    """Raise the exporter's errors as a one-line CheckpointError; unwrap a CheckpointError or MemoryError in them."""
    try:
        yield
    except Exception as error:  # torch.export raises many unrelated types
        if cause := next((each for each in _causes(error) if isinstance(each, CheckpointError | MemoryError)), None):
            raise cause from None
        reason = next(filter(None, map(_missing, _causes(error))), None)
        reason = reason or (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise CheckpointError(f"{type(model).__name__} cannot be exported by torch.onnx: {reason}") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _missing(error: BaseException) -> str | None:
    """Return what an error says of an operator that ONNX lacks."""
    found = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", str(error))
    return f"ONNX has no {found[1]}" if found else None


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection, which would scan a trace's objects again and again, and collect afterwards."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
            gc.collect(0)  # the youngest generation: objects made meanwhile


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's messages to its own developers, and disable garbage collection."""
    with (
        only_errors("torch.onnx"),
        only_errors("torch._subclasses.fake_tensor", logging.CRITICAL),  # it logs what it raises, even an interrupt
        _uncollected(),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
