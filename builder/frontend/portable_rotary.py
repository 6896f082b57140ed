"""Rotary position embedding at export: the embedding becomes a table by position, each rotation one operator.

Two things in `transformers`' modeling files are replaced: the rotary embedding modules, and the module-level function
`apply_rotary_pos_emb`. A model without them, or with a different rotation, keeps its own code.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specbuild.runtime.errors import CheckpointError

from .portable_ops import rotary


class RotaryTable(nn.Module):
    """A rotary embedding as tables, cos and sin `[rows, R]`, or `[rows, R/2]` with `halves`; one pair per layer type.

    Rows from `positions` on repeat the last one: only drafted nodes past the longest text read them.
    """

    def __init__(self, embedding: nn.Module, positions: int, rows: int, halves: bool) -> None:
        super().__init__()
        for layer_type in _layer_types(embedding):
            for name, table in zip(("cos", "sin"), _tables(embedding, positions, layer_type), strict=True):
                half = table[:, : table.shape[1] // (2 if halves else 1)]
                padded = torch.cat((half, half[-1:].expand(rows - positions, -1)))
                self.register_buffer(f"{name}_{layer_type}", padded.contiguous())

    def forward(self, _x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin at `position_ids [B, N]`: `[B, N, R]` or `[B, N, R/2]` each."""
        cos, sin = (self.get_buffer(f"{name}_{layer_type}") for name in ("cos", "sin"))
        return nn.functional.embedding(position_ids, cos), nn.functional.embedding(position_ids, sin)


def _is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


def _layer_types(embedding: nn.Module) -> list[str | None]:
    """Return the layer types that an embedding distinguishes (Gemma 3's local and global ones), or [None]."""
    if "layer_type" in inspect.signature(embedding.forward).parameters:
        return list(embedding.layer_types)  # type: ignore[arg-type]
    return [None]


def _tables(embedding: nn.Module, positions: int, layer_type: str | None) -> tuple[Tensor, Tensor]:
    """Return cos and sin `[positions, R]`; raise CheckpointError if they depend on more than the position."""
    options = {} if layer_type is None else {"layer_type": layer_type}

    def rows(count: int) -> tuple[Tensor, Tensor]:
        found = embedding(torch.zeros(1), torch.arange(count)[None], **options)
        if not isinstance(found, tuple) or len(found) != 2:
            raise CheckpointError("the model's rotary embedding is no pair of cosines and sines: not supported")
        return found

    def constant(count: int) -> bool:
        return all(
            torch.equal(few, many[:, : few.shape[1]])
            for few, many in zip(rows(min(4, count)), rows(count), strict=True)
        )

    if not constant(positions):
        fits = bisect.bisect_left(range(1, positions), True, key=lambda count: not constant(count))
        raise CheckpointError(
            f"the model's rope scaling depends on the length of the text past {fits} tokens, which is not supported: "
            f"build with --max-seq-len {fits}"
        )
    cos, sin = rows(positions)
    return cos[0], sin[0]


def check(model: PreTrainedModel, positions: int) -> None:
    """Make a model on the meta device compute its rotary embeddings on the CPU, where they have values to check.

    Raises CheckpointError if they depend on the length of the text, up to `positions` tokens.
    """
    for module in model.modules():
        if _is_rotary(module):
            try:
                embedding = type(module)(model.config.get_text_config())
            except (TypeError, AttributeError, KeyError):
                continue  # it has another constructor: the export checks it
            for layer_type in _layer_types(embedding):
                _tables(embedding, positions, layer_type)
            module.forward = functools.partial(_meta, embedding)


def _meta(embedding: nn.Module, _x: Tensor, position_ids: Tensor, *layer_type: str) -> tuple[Tensor, ...]:
    positions = torch.zeros(position_ids.shape, dtype=torch.int64)
    return tuple(part.to("meta") for part in embedding(torch.zeros(1), positions, *layer_type))


def swap(model: PreTrainedModel, positions: int, rows: int, undo: contextlib.ExitStack) -> None:
    """Replace a model's rotary embeddings by tables, and its rotations by `specbuild::rotary` if they are the same.

    Args:
        model: The model, changed in place.
        positions: Maximum number of tokens in a text.
        rows: Rows of each table, at least `positions`.
        undo: Receives the callbacks that restore the model.
    """
    modeling = sys.modules[type(model).__module__]
    original = getattr(modeling, "apply_rotary_pos_emb", None)
    halves = original is not None and _rotates_halves(original)
    for path, module in list(model.named_modules()):
        if _is_rotary(module):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, RotaryTable(module, positions, rows, halves))
            undo.callback(setattr, model.get_submodule(parent), name, module)
    if halves:
        modeling.apply_rotary_pos_emb = _apply  # type: ignore[attr-defined]
        undo.callback(setattr, modeling, "apply_rotary_pos_emb", original)


def _apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Replace a modeling file's `apply_rotary_pos_emb`; heads are at axis `unsqueeze_dim`."""
    q, k = (x.transpose(1, unsqueeze_dim) for x in (q, k))
    q, k = (rotary(x, cos, sin) for x in (q, k))
    return q.transpose(1, unsqueeze_dim), k.transpose(1, unsqueeze_dim)


def _rotates_halves(function: Any) -> bool:
    """Return whether a model's own rotation computes what `specbuild::rotary` does, tested on random input."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 3, 8, generator=generator) for _ in range(2))
    cos, sin = (torch.randn(1, 3, 4, generator=generator) for _ in range(2))
    try:
        theirs = function(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    except (TypeError, RuntimeError, ValueError):
        return False
    return len(theirs) == 2 and all(
        torch.allclose(mine, other, atol=1e-6)
        for mine, other in zip((rotary(x, cos, sin) for x in (q, k)), theirs, strict=True)
    )
