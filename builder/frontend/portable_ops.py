"""The operators that the exporter swaps into a Hugging Face model, with their eager implementations.

Each one is a `torch.library` custom op, so a patched model still runs in PyTorch (which the tests compare), and each
translates to one ONNX node, so the portable graph has a single node where the model had a subgraph:

| op                        | ONNX                                  |
| ------------------------- | ------------------------------------- |
| specbuild::tree_attention | specbuild::TreeAttention, version 1   |
| specbuild::rotary         | RotaryEmbedding, opset 23             |
| specbuild::tree_convolution | specbuild::TreeConvolution, version 1 |
| specbuild::tree_recurrence | specbuild::TreeRecurrence, version 1 |
| specbuild::expert_matmul  | specbuild::ExpertMatMul, version 1    |
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
        "tables by position, queries and keys are rotated first. Sinks are scores that every node of a head sees.",
        inputs=[schema.FormalParameter(n, "T") for n in tensor]
        + [schema.FormalParameter("position_ids", "tensor(int64)")]
        + [schema.FormalParameter(n, "tensor(int32)") for n in index]
        + [schema.FormalParameter(n, "T", param_option=optional) for n in ("cos", "sin", "sinks")],
        outputs=[schema.FormalParameter(n, "T") for n in ("output", "present_key", "present_value")],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "activations and cache")],
        attributes=[
            schema.Attribute("scale", schema.AttrType.FLOAT, "scale of the scores", required=True),
            schema.Attribute(
                "window", onnx.helper.make_attribute("window", 0), "positions a node sees; 0: all; −c: a chunk"
            ),
            schema.Attribute("softcap", onnx.helper.make_attribute("softcap", 0.0), "bound of the scores; 0: none"),
        ],
    )


def _expert_matmul_schema() -> onnx.defs.OpSchema:
    """Return the schema of the products of rows with the weights that they chose."""
    schema = onnx.defs.OpSchema
    return schema(
        "ExpertMatMul",
        DOMAIN,
        1,
        doc="Row s of the output is row s · R / S of x by the weight of expert `chosen[s]`; `turned`: weights [K, N].",
        inputs=[schema.FormalParameter(n, "T") for n in ("x", "weight")]
        + [schema.FormalParameter("chosen", "tensor(int64)")],
        outputs=[schema.FormalParameter("output", "T")],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "activations and weights")],
        attributes=[schema.Attribute("turned", onnx.helper.make_attribute("turned", 0), "whether weights are [K, N]")],
    )


def _tree_convolution_schema() -> onnx.defs.OpSchema:
    """Return the schema of a convolution over each node's own path."""
    schema = onnx.defs.OpSchema
    floats, index = ["x", "weight", "bias", "past_key", "past_value"], ["parents", "cache_len", "tree_offset"]
    optional = schema.FormalParameterOption.Optional
    return schema(
        "TreeConvolution",
        DOMAIN,
        1,
        doc="Convolution of new tree nodes with the rows of their own path; a row has each channel's number.",
        inputs=[schema.FormalParameter(n, "T", param_option=optional) for n in floats]
        + [schema.FormalParameter("position_ids", "tensor(int64)")]
        + [schema.FormalParameter(n, "tensor(int32)") for n in index],
        outputs=[schema.FormalParameter(n, "T") for n in ("output", "present_key", "present_value")],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "activations and cache")],
    )


def _tree_recurrence_schema() -> onnx.defs.OpSchema:
    """Return the schema of linear attention over each node's own path."""
    schema = onnx.defs.OpSchema
    floats = ["query", "key", "value", "decay", "beta", "past_key", "past_value"]
    index = ["parents", "cache_len", "tree_offset"]
    return schema(
        "TreeRecurrence",
        DOMAIN,
        1,
        doc="States that decay, and that each token of a node's own path changes by its key and value. `delta`: what "
        "the state has at a key already is taken off its value.",
        inputs=[schema.FormalParameter(n, "T") for n in floats]
        + [schema.FormalParameter("position_ids", "tensor(int64)")]
        + [schema.FormalParameter(n, "tensor(int32)") for n in index],
        outputs=[schema.FormalParameter(n, "T") for n in ("output", "present_key", "present_value")],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "activations and cache")],
        attributes=[schema.Attribute("delta", schema.AttrType.INT, "whether it is the delta rule", required=True)],
    )


for _schema in (
    _tree_attention_schema(),
    _tree_convolution_schema(),
    _tree_recurrence_schema(),
    _expert_matmul_schema(),
):
    if not onnx.defs.has(_schema.name, DOMAIN):
        onnx.defs.register_schema(_schema)


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
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention of N new tree nodes over the committed cache, their ancestors and themselves.

    Args:
        query: `[B, H, N, D]`, already rotated.
        key: `[B, Hkv, N, D]`, already rotated.
        value: `[B, Hkv, N, Dv]`.
        past: The key and the value cache, `[B, Hkv, S, D]` and `[B, Hkv, S, Dv]`.
        place: position_ids `int64[B, N]`, parents `int32[B, M]` (the whole tree), cache_len and tree_offset `int32[B]`.
            The new nodes are nodes `tree_offset … tree_offset + N − 1` of the tree; node i goes to the cache row
            `cache_len + i`.
        sinks: `[H]`: a further score of each head, of no value; None: none.
        scale: Factor of the scores.
        window: How many positions a node sees, its own included; 0: all; −c: those of its chunk of c positions. A
            committed row's position is its row number, a node's is `cache_len` + its depth.
        softcap: Scores become `softcap · tanh(scores / softcap)`; 0 for no cap.

    Returns:
        The output `[B, N, H, Dv]`, and both caches with the new rows in place.
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
        positions = torch.arange(capacity)
        positions[committed:stop] = committed - 1 + ancestors[b].sum(1)[: offset + nodes]
        if window > 0:
            visible[b] &= position_ids[b, :, None] - positions < window
        if window < 0:
            visible[b] &= position_ids[b, :, None] // -window == positions // -window
    group = heads // key.shape[1]
    scores = query @ new_key.repeat_interleave(group, 1).transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(batch, -1, nodes, 1)), -1)
    weights = scores.softmax(-1)[..., :capacity]
    out = weights @ new_value.repeat_interleave(group, 1)
    return out.transpose(1, 2).contiguous(), new_key, new_value


@tree_attention.register_fake
def _(query, key, value, past, *_):  # type: ignore[no-untyped-def]
    batch, heads, nodes, _ = query.shape
    out = query.new_empty(batch, nodes, heads, value.shape[3])
    return out, *map(torch.empty_like, past)


@torch.library.custom_op("specbuild::tree_convolution", mutates_args=())
def tree_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Sequence[Tensor], place: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve N new tree nodes with the last tokens before them, their ancestors' and the committed ones.

    Args:
        x: `[B, N, C]`.
        weight: `[C, L]`; the last column is the node's own.
        bias: `[C]`; None: none.
        past: The cache's rows, `[B, 1, S, C - C // 2]` and the other channels `[B, 1, S, C // 2]`.
        place: See `tree_attention`.

    Returns:
        The output `[B, N, C]`, and the cache with the new rows in place.
    """
    batch, nodes, channels = x.shape
    rows, taps = torch.cat(list(past), 3).squeeze(1).clone(), weight.shape[1]
    _, parents, cache_len, tree_offset = place
    ancestors, out = ancestor_mask(parents), x.new_zeros(batch, nodes, channels)
    for b in range(batch):
        committed, offset = int(cache_len[b]), int(tree_offset[b])
        rows[b, committed + offset : committed + offset + nodes] = x[b]
        for node in range(nodes):
            path = committed + ancestors[b, offset + node].nonzero()[:, 0]
            seen = rows[b, torch.cat((torch.arange(committed), path))[-taps:]]
            out[b, node] = (seen * weight.T[-len(seen) :]).sum(0)
    half = channels - channels // 2
    key, value = rows[:, None, :, :half].contiguous(), rows[:, None, :, half:].contiguous()
    return out if bias is None else out + bias, key, value


@tree_convolution.register_fake
def _(x, weight, bias, past, place):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format), *map(torch.empty_like, past)


@torch.library.custom_op("specbuild::tree_recurrence", mutates_args=())
def tree_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    past: Sequence[Tensor],
    place: Sequence[Tensor],
    delta: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute linear attention of N new tree nodes, whose states are made of the rows of their own paths.

    A token makes of a head's state S `[K, V]` the state S' + key ⊗ beta (value − delta · key S'), S' being S times
    decay; its output is query S of the new one. The first token's S is 0.

    Args:
        query: `[B, N, G, K]`, for H / G heads each.
        key: Alike.
        value: `[B, N, H, V]`.
        decay: `[B, N, H]`, or `[B, N, H, K]` for each row of the state.
        beta: `[B, N, H]`.
        past: The cache's rows: keys, decays and betas `[B, 1, S, …]`, and values `[B, 1, S, H · V]`.
        place: See `tree_attention`.
        delta: Whether what the state has at a key is taken off its value.

    Returns:
        The output `[B, N, H, V]`, and both caches with the new rows in place.
    """
    batch, nodes, heads, columns = value.shape
    groups, size = key.shape[2:]
    rows = [each[:, 0].clone() for each in past]
    _, parents, cache_len, tree_offset = place
    ancestors, out = ancestor_mask(parents), torch.zeros_like(value, memory_format=torch.contiguous_format)
    new = torch.cat((key.flatten(2), decay.flatten(2), beta), 2), value.flatten(2)
    sizes = [groups * size, decay[0, 0].numel(), heads]
    for b in range(batch):
        committed, offset = int(cache_len[b]), int(tree_offset[b])
        for each, added in zip(rows, new, strict=True):
            each[b, committed + offset : committed + offset + nodes] = added[b]
        keys, decays, betas = torch.split(rows[0][b], sizes, 1)
        for node in range(nodes):
            state = value.new_zeros(heads, size, columns)
            for row in [*range(committed), *(committed + ancestors[b, offset + node].nonzero()[:, 0]).tolist()]:
                k = keys[row].view(groups, size).repeat_interleave(heads // groups, 0)[:, :, None]
                v = rows[1][b, row].view(heads, 1, columns)
                state = state * decays[row].view(heads, -1, 1)
                state = state + k * (betas[row].view(heads, 1, 1) * (v - (k * state).sum(1, keepdim=True) * delta))
            asked = query[b, node].repeat_interleave(heads // groups, 0)
            out[b, node] = (asked[:, :, None] * state).sum(1)
    return out, rows[0][:, None].contiguous(), rows[1][:, None].contiguous()


@tree_recurrence.register_fake
def _(query, key, value, decay, beta, past, place, delta):  # type: ignore[no-untyped-def]
    return torch.empty_like(value, memory_format=torch.contiguous_format), *map(torch.empty_like, past)


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


@torch.library.custom_op("specbuild::expert_matmul", mutates_args=())
def expert_matmul(x: Tensor, weight: Tensor, chosen: Tensor, turned: bool) -> Tensor:
    """Multiply rows `x [R, K]` with the weights that they chose: `[S, N]`, row s of x's row s · R / S.

    Args:
        x: The rows.
        weight: Each expert's weight, `[E, N, K]`, or `[E, K, N]` if `turned`.
        chosen: `int64[R, S / R]`, each row's experts.
        turned: See `weight`.
    """
    experts = weight if turned else weight.transpose(1, 2)
    rows = x.repeat_interleave(chosen.numel() // x.shape[0], 0)
    return torch.bmm(rows[:, None], experts[chosen.flatten()])[:, 0]


@expert_matmul.register_fake
def _(x, weight, chosen, turned):  # type: ignore[no-untyped-def]
    return x.new_empty(chosen.shape[0] * chosen.shape[1], weight.shape[2 if turned else 1])


def _onnx_tree_attention(*arguments: Any) -> Any:
    *heads, past, place, sinks, scale, window, softcap = arguments
    more = () if sinks is None else (None, None, sinks)  # after the rotary tables, which a pass puts in
    return _specbuild.TreeAttention(*heads, *past, *place, *more, scale=scale, window=window, softcap=softcap)


def _onnx_tree_convolution(x: Any, weight: Any, bias: Any, past: Any, place: Any) -> Any:
    return _specbuild.TreeConvolution(x, weight, bias, *past, *place)


def _onnx_tree_recurrence(*arguments: Any) -> Any:
    *changes, past, place, delta = arguments
    return _specbuild.TreeRecurrence(*changes, *past, *place, delta=int(delta))


def _onnx_rotary(x: Any, cos: Any, sin: Any) -> Any:
    width, size = 2 * cos.shape[-1], x.shape[-1]
    return opset23.RotaryEmbedding(x, cos, sin, None, rotary_embedding_dim=0 if width == size else width)


def _onnx_expert_matmul(x: Any, weight: Any, chosen: Any, turned: bool) -> Any:
    return _specbuild.ExpertMatMul(x, weight, chosen, turned=int(turned))


# The inverse of the error function in float32, by M. Giles (GPU Computing Gems, 2010): near 0, and elsewhere.
_NEAR = [2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503]
_NEAR += [-0.00417768164, 0.246640727, 1.50140941]
_FAR = [-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613]
_FAR += [0.00943887047, 1.00167406, 2.83297682]


def _onnx_erf_inv(x: Any) -> Any:
    op = opset23

    def polynomial(factors: Sequence[float], y: Any) -> Any:
        total = op.Constant(value_float=factors[0])
        for factor in factors[1:]:
            total = op.Add(op.Mul(total, y), op.Constant(value_float=factor))
        return total

    w = op.Neg(op.Log(op.Sub(op.Constant(value_float=1.0), op.Mul(x, x))))
    near = polynomial(_NEAR, op.Sub(w, op.Constant(value_float=2.5)))
    far = polynomial(_FAR, op.Sub(op.Sqrt(w), op.Constant(value_float=3.0)))
    return op.Mul(x, op.Where(op.Less(w, op.Constant(value_float=5.0)), near, far))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.specbuild.tree_attention.default: _onnx_tree_attention,
    torch.ops.specbuild.tree_convolution.default: _onnx_tree_convolution,
    torch.ops.specbuild.tree_recurrence.default: _onnx_tree_recurrence,
    torch.ops.specbuild.rotary.default: _onnx_rotary,
    torch.ops.specbuild.expert_matmul.default: _onnx_expert_matmul,
    torch.ops.prims.erf_inv.default: _onnx_erf_inv,  # torch's exporter has none
}
__all__ = [
    "DOMAIN",
    "OPSET",
    "TRANSLATIONS",
    "ancestor_mask",
    "expert_matmul",
    "rotary",
    "tree_attention",
    "tree_convolution",
    "tree_recurrence",
]
