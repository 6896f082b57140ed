"""The operators that the exporter swaps into a Hugging Face model, and what each is in the portable graph.

Each translates to one ONNX node, so the portable graph has a single node where the model had a subgraph. PyTorch knows
their shapes alone, which is what an export needs; `rotary` computes too, to be compared with a model's own rotation.

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
from onnx.defs import OpSchema
from onnxscript import opset23
from onnxscript.values import Opset
from torch import Tensor

OPSET = 23
DOMAIN = "specbuild"
_specbuild = Opset(DOMAIN, 1)
_PLACE = {"position_ids": "tensor(int64)"} | dict.fromkeys(("parents", "cache_len", "tree_offset"), "tensor(int32)")
_CACHED = "output", "present_key", "present_value"


def _register(
    name: str, doc: str, inputs: dict[str, str], outputs: Sequence[str], *attributes: Any, optional: Sequence[str] = ()
) -> None:
    """Register an operator's ONNX schema.

    Args:
        name: The operator.
        doc: What it computes.
        inputs: Their types by name; T: float32, float16 or bfloat16, alike for all.
        outputs: Their names; all are of type T.
        attributes: `OpSchema.Attribute`s.
        optional: The inputs that may be missing.
    """
    options = OpSchema.FormalParameterOption
    schema = OpSchema(
        name,
        DOMAIN,
        1,
        doc=doc,
        inputs=[
            OpSchema.FormalParameter(each, kind, param_option=options.Optional if each in optional else options.Single)
            for each, kind in inputs.items()
        ],
        outputs=[OpSchema.FormalParameter(each, "T") for each in outputs],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "floats")],
        attributes=list(attributes),
    )
    onnx.defs.register_schema(schema)


def _of_type_t(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "T")


def _default(name: str, value: float, doc: str) -> Any:
    return OpSchema.Attribute(name, onnx.helper.make_attribute(name, value), doc)


_register(
    "TreeAttention",
    "Attention of new tree nodes over the committed cache, their ancestors and themselves. With cos and sin, "
    "tables by position, queries and keys are rotated first. Sinks are scores that every node of a head sees.",
    _of_type_t("query", "key", "value", "past_key", "past_value") | _PLACE | _of_type_t("cos", "sin", "sinks"),
    _CACHED,
    OpSchema.Attribute("scale", OpSchema.AttrType.FLOAT, "scale of the scores", required=True),
    _default("window", 0, "positions a node sees; 0: all; −c: a chunk"),
    _default("softcap", 0.0, "bound of the scores; 0: none"),
    optional=("cos", "sin", "sinks"),
)
_register(
    "TreeConvolution",
    "Convolution of new tree nodes with the rows of their own path; a row has each channel's number.",
    _of_type_t("x", "weight", "bias", "past_key", "past_value") | _PLACE,
    _CACHED,
    optional=("bias",),
)
_register(
    "TreeRecurrence",
    "States that decay, and that each token of a node's own path changes by its key and value. `delta`: what "
    "the state has at a key already is taken off its value.",
    _of_type_t("query", "key", "value", "decay", "beta", "past_key", "past_value") | _PLACE,
    _CACHED,
    OpSchema.Attribute("delta", OpSchema.AttrType.INT, "whether it is the delta rule", required=True),
)
_register(
    "ExpertMatMul",
    "Row s of the output is row s · R / S of x by the weight of expert `chosen[s]`; `turned`: weights [K, N].",
    _of_type_t("x", "weight") | {"chosen": "tensor(int64)"},
    ("output",),
    _default("turned", 0, "whether weights are [K, N]"),
)


def _operator(shapes: Callable[..., Any]) -> Callable[..., Any]:
    """Define the torch operator of a function's name and arguments, which returns empty tensors of its shapes."""
    name = f"{DOMAIN}::{shapes.__name__}"
    torch.library.define(name, torch.library.infer_schema(shapes, mutates_args=()))
    torch.library.register_fake(name, shapes)
    return shapes


@_operator
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
    return query.new_empty(batch, nodes, heads, value.shape[3]), *_like(past)


@_operator
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
    return torch.empty_like(x, memory_format=torch.contiguous_format), *_like(past)


@_operator
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
    return torch.empty_like(value, memory_format=torch.contiguous_format), *_like(past)


@_operator
def expert_matmul(x: Tensor, weight: Tensor, chosen: Tensor, turned: bool) -> Tensor:
    """Multiply rows `x [R, K]` with the weights that they chose: `[S, N]`, row s of x's row s · R / S.

    Args:
        x: The rows.
        weight: Each expert's weight, `[E, N, K]`, or `[E, K, N]` if `turned`.
        chosen: `int64[R, S / R]`, each row's experts.
        turned: See `weight`.
    """
    return x.new_empty(chosen.shape[0] * chosen.shape[1], weight.shape[2 if turned else 1])


def _like(past: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    key, value = past
    return torch.empty_like(key), torch.empty_like(value)


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
