"""Rotary position embedding at export: the embedding becomes a table by position, each rotation one operator.

Two things in `transformers`' modeling files are replaced: the rotary embedding modules, and the module-level functions
`apply_rotary…` that rotate by halves, by pairs, or by complex numbers. A model without them, or with another rotation,
keeps its own code.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specbuild.runtime.errors import CheckpointError

Rotation = Callable[..., tuple[Tensor, Tensor]]


class RotaryTable(nn.Module):
    """A rotary embedding as tables, cos and sin `[rows, R]`, or `[rows, R/2]` with `halves`; one pair per layer type.

    Rows from `positions` on repeat the last one: only drafted nodes past the longest text read them.
    """

    def __init__(self, embedding: nn.Module, positions: int, rows: int, halves: bool) -> None:
        super().__init__()
        self.config, self.layer_types = getattr(embedding, "config", None), getattr(embedding, "layer_types", None)
        for layer_type in _layer_types(embedding):
            found, self._complex = _tables(embedding, positions, layer_type)
            for name, table in zip(("cos", "sin"), found, strict=True):
                half = table[:, : table.shape[1] // (2 if halves and not self._complex else 1)]
                padded = torch.cat((half, half[-1:].expand(rows - positions, -1)))
                self.register_buffer(f"{name}_{layer_type}", padded.contiguous())

    def forward(self, _x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return cos and sin at positions `[B, N]`: `[B, N, R]` or `[B, N, R/2]`; of complex ones `[B, N, R/2, 2]`.

        Of positions `[3, B, N]`, as models that see images have them, the first are a text's.
        """
        position_ids = position_ids[0] if position_ids.ndim == 3 else position_ids
        cos, sin = (self.get_buffer(f"{name}_{layer_type}") for name in ("cos", "sin"))
        found = nn.functional.embedding(position_ids, cos), nn.functional.embedding(position_ids, sin)
        return torch.stack(found, -1) if self._complex else found


def modeling_of(model: PreTrainedModel) -> ModuleType:
    """Return the modeling file of a model's layers, which a head of another file's layers has as `modeling`."""
    found: ModuleType = getattr(model, "modeling", sys.modules[type(model).__module__])
    return found


def _is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


def _layer_types(embedding: nn.Module) -> list[str | None]:
    """Return the layer types that an embedding distinguishes (Gemma 3's local and global ones), or [None]."""
    if "layer_type" in inspect.signature(embedding.forward).parameters:
        return list(embedding.layer_types)  # type: ignore[arg-type]
    return [None]


def _tables(embedding: nn.Module, positions: int, layer_type: str | None) -> tuple[tuple[Tensor, Tensor], bool]:
    """Return cos and sin `[positions, R]`, and whether the embedding has them as one complex number `[positions, R/2]`.

    Raises CheckpointError if they depend on more than the position.
    """
    options = {} if layer_type is None else {"layer_type": layer_type}

    def rows(count: int) -> tuple[Tensor, Tensor]:
        found = embedding(torch.zeros(1), torch.arange(count)[None], **options)
        if isinstance(found, Tensor) and found.is_complex():
            return found.real, found.imag
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
    complex_ = isinstance(embedding(torch.zeros(1), torch.zeros(1, 1, dtype=torch.int64), **options), Tensor)
    return (cos[0], sin[0]), complex_


def check(model: PreTrainedModel, positions: int) -> None:
    """Make a model on the meta device compute its rotary embeddings on the CPU, where they have values to check.

    Raises CheckpointError if they depend on the length of the text, up to `positions` tokens.
    """
    for module in model.modules():
        if _is_rotary(module):
            try:
                embedding = type(module)(getattr(module, "config", model.config.get_text_config()))
            except (TypeError, AttributeError, KeyError):
                continue  # it has another constructor: the export checks it
            for layer_type in _layer_types(embedding):
                _, complex_ = _tables(embedding, positions, layer_type)
                if complex_ and not _rotations(modeling_of(model), complex_):
                    raise CheckpointError("the model's rotation by complex numbers is not supported")
            module.forward = functools.partial(_meta, embedding)


def _meta(embedding: nn.Module, _x: Tensor, position_ids: Tensor, *of_layer: str, **named: str) -> Any:
    positions = torch.zeros(position_ids.shape, dtype=torch.int64)
    found = embedding(torch.zeros(1), positions, *of_layer, **named)
    return found.to("meta") if isinstance(found, Tensor) else tuple(part.to("meta") for part in found)


def swap(model: PreTrainedModel, positions: int, rows: int, undo: contextlib.ExitStack) -> None:
    """Replace a model's rotary embeddings by tables, and its rotations by `specbuild::rotary` if they are the same.

    Args:
        model: The model, changed in place.
        positions: Maximum number of tokens in a text.
        rows: Rows of each table, at least `positions`.
        undo: Receives the callbacks that restore the model.
    """
    modeling, embeddings = modeling_of(model), _embeddings(model)
    complex_ = any(_tables(each, 1, layer_type)[1] for each in embeddings.values() for layer_type in _layer_types(each))
    replaced = _rotations(modeling, complex_)
    for path, module in embeddings.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, RotaryTable(module, positions, rows, bool(replaced)))
        undo.callback(setattr, model.get_submodule(parent), name, module)
    for name, rotation in replaced.items():
        undo.callback(setattr, modeling, name, getattr(modeling, name))
        setattr(modeling, name, rotation)


def _embeddings(model: PreTrainedModel) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if _is_rotary(module)}


def _rotations(modeling: Any, complex_: bool) -> dict[str, Rotation]:
    """Return what replaces each of a modeling file's rotations of queries and keys; {} if one cannot be replaced."""
    names = [name for name in vars(modeling) if name.startswith("apply_rotary") and "vision" not in name]
    known = [_by_pairs(1), _by_pairs(2)] if complex_ else [_by_halves, _turned_to_halves]
    found = {name: [each for each in known if _same(getattr(modeling, name), each, complex_)] for name in names}
    return {name: each[0] for name, each in found.items()} if all(found.values()) else {}


def _by_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate the halves of heads, which are at axis `unsqueeze_dim`."""
    q, k = (x.transpose(1, unsqueeze_dim) for x in (q, k))
    q, k = (torch.ops.specbuild.rotary(x, cos, sin) for x in (q, k))  # registered by `portable_ops`
    return q.transpose(1, unsqueeze_dim), k.transpose(1, unsqueeze_dim)


def _turned_to_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate the pairs of heads, and put the first of each pair into the first half."""
    q, k = (torch.cat((x[..., 0::2], x[..., 1::2]), -1) for x in (q, k))
    return _by_halves(q, k, cos, sin, unsqueeze_dim)


def _by_pairs(axis: int) -> Rotation:
    """Return the rotation of the pairs of heads by complex numbers; heads are at `axis`."""

    def rotate(q: Tensor, k: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (part.unsqueeze(axis) for part in places.unbind(-1))

        def one(x: Tensor) -> Tensor:
            first, second = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
            return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)

        return one(q), one(k)

    return rotate


def _same(theirs: Any, mine: Rotation, complex_: bool) -> bool:
    """Return whether a model's own rotation computes what another does, tested on random input."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 3, 3, 8, generator=generator) for _ in range(2))  # heads at either axis
    cos, sin = (torch.randn(1, 3, 4, generator=generator) for _ in range(2))
    whole = (torch.complex(cos, sin),) if complex_ else (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    try:
        expected = mine(q, k, *((torch.stack((cos, sin), -1),) if complex_ else (cos, sin)))
        found = theirs(q, k, *whole)
    except (TypeError, RuntimeError, ValueError):
        return False
    return len(found) == 2 and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, found, strict=True))
