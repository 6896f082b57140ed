"""The operators that the exporter swaps into a Hugging Face model, with their eager implementations.

Each one is a `torch.library` custom op, so a patched model still runs in PyTorch (which the tests compare), and each
translates to one ONNX node, so the portable graph has a single node where the model had a subgraph:

| op                        | ONNX                                  |
| ------------------------- | ------------------------------------- |
| specbuild::tree_attention | specbuild::TreeAttention, version 1   |
| specbuild::rotary         | RotaryEmbedding, opset 23             |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import torch
from onnxscript import opset23
from onnxscript.values import Opset
from torch import Tensor

OPSET = 23
DOMAIN = "specbuild"
_specbuild = Opset(DOMAIN, 1)


def _tree_attention_schema() -> onnx.defs.OpSchema:
    """Return the portable operator's ONNX schema."""
    schema = onnx.defs.OpSchema
    tensor = ["query", "key", "value", "past_key", "past_value"]
    index = ["parents", "cache_len", "tree_offset"]
    optional = schema.FormalParameterOption.Optional
    return schema(
        "TreeAttention",
        DOMAIN,
        1,
        doc="Attention of new tree nodes over the committed cache, their ancestors and themselves. With cos and sin, "
        "tables by position, queries and keys are rotated first.",
        inputs=[schema.FormalParameter(n, "T") for n in tensor]
        + [schema.FormalParameter("position_ids", "tensor(int64)")]
        + [schema.FormalParameter(n, "tensor(int32)") for n in index]
        + [schema.FormalParameter(n, "T", param_option=optional) for n in ("cos", "sin")],
        outputs=[schema.FormalParameter(n, "T") for n in ("output", "present_key", "present_value")],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "activations and cache")],
        attributes=[
            schema.Attribute("scale", schema.AttrType.FLOAT, "scale of the scores", required=True),
            schema.Attribute("window", onnx.helper.make_attribute("window", 0), "positions a node sees; 0: all"),
            schema.Attribute("softcap", onnx.helper.make_attribute("softcap", 0.0), "bound of the scores; 0: none"),
        ],
    )


if not onnx.defs.has("TreeAttention", DOMAIN):
    onnx.defs.register_schema(_tree_attention_schema())


def ancestor_mask(parents: Tensor) -> Tensor:
    """Return which nodes of a tree see which: `bool[B, M, M]`, row i true at i and at every ancestor of i.

    `parents` is `int[B, M]`, −1 for a node whose parent is already committed; parents come before children.
    """
    batch, nodes = parents.shape
    mask = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    for node in range(nodes):
        parent = parents[:, node].long()
        inherited = mask[torch.arange(batch), parent.clamp(min=0)]
        mask[:, node] |= inherited & (parent >= 0)[:, None]
    return mask


@torch.library.custom_op("specbuild::tree_attention", mutates_args=())
def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Sequence[Tensor],
    place: Sequence[Tensor],
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention of N new tree nodes over the committed cache, their ancestors and themselves.

    Args:
        query: `[B, H, N, D]`, already rotated.
        key: `[B, Hkv, N, D]`, already rotated.
        value: `[B, Hkv, N, D]`.
        past: The key and the value cache, `[B, Hkv, S, D]` each.
        place: position_ids `int64[B, N]`, parents `int32[B, M]` (the whole tree), cache_len and tree_offset `int32[B]`.
            The new nodes are nodes `tree_offset … tree_offset + N − 1` of the tree; node i goes to the cache row
            `cache_len + i`.
        scale: Factor of the scores.
        window: How many positions a node sees, its own included; 0 for all. A committed row's position is its row
            number, a node's is `cache_len` + its depth.
        softcap: Scores become `softcap · tanh(scores / softcap)`; 0 for no cap.

    Returns:
        The output `[B, N, H, D]`, and both caches with the new rows in place.
    """
    batch, heads, nodes, _ = query.shape
    new_key, new_value = (rows.clone() for rows in past)
    position_ids, parents, cache_len, tree_offset = place
    capacity = new_key.shape[2]
    visible = torch.zeros(batch, nodes, capacity, dtype=torch.bool)
    ancestors = ancestor_mask(parents)
    for b in range(batch):
        committed, offset = int(cache_len[b]), int(tree_offset[b])
        start, stop = committed + offset, committed + offset + nodes
        new_key[b, :, start:stop], new_value[b, :, start:stop] = key[b], value[b]
        visible[b, :, :committed] = True
        visible[b, :, committed:stop] = ancestors[b, offset : offset + nodes, : offset + nodes]
        if window:
            positions = torch.arange(capacity)
            positions[committed:stop] = committed - 1 + ancestors[b].sum(1)[: offset + nodes]
            visible[b] &= position_ids[b, :, None] - positions < window
    group = heads // key.shape[1]
    scores = query @ new_key.repeat_interleave(group, 1).transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    out = weights @ new_value.repeat_interleave(group, 1)
    return out.transpose(1, 2).contiguous(), new_key, new_value


@tree_attention.register_fake
def _(query, key, value, past, *_):  # type: ignore[no-untyped-def]
    batch, heads, nodes, size = query.shape
    out = query.new_empty(batch, nodes, heads, size)
    return out, *map(torch.empty_like, past)


@torch.library.custom_op("specbuild::rotary", mutates_args=())
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of `x [B, H, N, D]` by `cos`, `sin` `[B, N, R/2]`; dimensions past R stay as they are."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@rotary.register_fake
def _(x, cos, sin):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


def _onnx_tree_attention(*arguments: Any) -> Any:
    *heads, past, place, scale, window, softcap = arguments
    return _specbuild.TreeAttention(*heads, *past, *place, scale=scale, window=window, softcap=softcap)


def _onnx_rotary(x: Any, cos: Any, sin: Any) -> Any:
    width, size = 2 * cos.shape[-1], x.shape[-1]
    return opset23.RotaryEmbedding(x, cos, sin, None, rotary_embedding_dim=0 if width == size else width)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.specbuild.tree_attention.default: _onnx_tree_attention,
    torch.ops.specbuild.rotary.default: _onnx_rotary,
}
__all__ = ["DOMAIN", "OPSET", "TRANSLATIONS", "ancestor_mask", "rotary", "tree_attention"]
