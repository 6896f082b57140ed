"""Token mixers beside attention: an export replaces `transformers`' convolutions and recurrences by portable ones.

Their caches have a row for each token, as attention's have: the inputs that a convolution reads, or of which a state is
made. So a tree needs no states in the graph, and rows that were rejected are forgotten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from specbuild.runtime.errors import CheckpointError

from .portable_rotary import modeling_of

# `transformers`' names of functions whose states decay otherwise than by whole rows.
REFUSED = ("mamba_selective_scan",)

Convolve = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Recur(Protocol):
    """Linear attention over a text: see `portable_ops.tree_recurrence`."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, *, delta: bool
    ) -> Tensor:
        """Return the output `[B, N, H, V]`."""
        ...


@contextlib.contextmanager
def replaced(model: PreTrainedModel, convolve: Convolve, recur: Recur) -> Iterator[None]:
    """Replace a model's convolutions and recurrences while inside.

    Args:
        model: The model.
        convolve: Takes the tokens' numbers `[B, N, C]`, weights `[C, L]` and biases `[C]`, and returns `[B, N, C]`.
        recur: Takes what `portable_ops.tree_recurrence` takes beside the caches, and returns its output.
    """
    modeling = modeling_of(model)
    functions: dict[str, Callable[..., Any]] = {
        "causal_conv1d_fn": partial(_convolution, convolve),
        "torch_chunk_gated_delta_rule": partial(_delta_rule, modeling, recur),
        "chunk_kimi_delta_attention": partial(_delta_rule, modeling, recur),
        "mamba2_chunk_scan": partial(_state_space, recur),
    }
    functions |= {name: partial(_refuse, name) for name in REFUSED}
    with contextlib.ExitStack() as undo:
        for name in functions.keys() & vars(modeling).keys():
            undo.callback(setattr, modeling, name, getattr(modeling, name))
            setattr(modeling, name, functions[name])
        yield


def _convolution(
    convolve: Convolve,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    out = convolve(hidden_states.transpose(1, 2), weight, bias).transpose(1, 2)
    return ACT2FN[activation](out) if activation else out


def _delta_rule(
    modeling: ModuleType,
    recur: Recur,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the gated delta rule; `g` is the logarithm of a head's decay or (Kimi) of each of its keys' numbers."""
    if use_qk_l2norm_in_kernel:
        query, key = modeling.l2norm(query), modeling.l2norm(key)
    return recur(query * query.shape[-1] ** -0.5, key, value, g.exp(), beta, delta=True), None


def _state_space(
    recur: Recur,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 — transformers' names
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    **options: Any,
) -> Tensor:
    """Compute Mamba 2's scan: linear attention with `C` as queries, `B` as keys, and `dt` as beta."""
    if (bias := options.get("dt_bias")) is not None:
        dt = dt + bias
    if options.get("dt_softplus"):
        dt = functional.softplus(dt)
    dt = torch.clamp(dt, *options.get("dt_limit", (0.0, float("inf"))))
    out = recur(C, B, hidden_states, torch.exp(A * dt), dt, delta=False)
    direct = options.get("D")
    return out if direct is None else out + direct[:, None] * hidden_states


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    raise CheckpointError(f"its layers keep a state of a kind ({name}) that is not supported yet")
