"""Mixtures of experts at export: one operator for the products of rows with the weights that they chose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS = "specbuild"


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute what `transformers`' own implementations do, with `specbuild::expert_matmul` for its products."""

    def product(name: str, x: Tensor) -> Tensor:
        weight = getattr(module, name)
        found: Tensor = torch.ops.specbuild.expert_matmul(x, weight, top_k_index, module.is_transposed)
        if module.has_bias:
            found = found + getattr(module, f"{name}_bias")[top_k_index.flatten()]
        return found

    if module.has_gate:
        inner = module._apply_gate(product("gate_up_proj", hidden_states))
    else:
        inner = module.act_fn(product("up_proj", hidden_states))
    outer = product("down_proj", inner)
    if module.has_post_expert_norm:
        outer = module.post_expert_norm(outer)
    tokens, chosen = top_k_index.shape
    return _in_order(outer.view(tokens, chosen, -1) * top_k_weights[..., None]).to(hidden_states.dtype)


def _in_order(shares: Tensor) -> Tensor:
    """Return the sum over the chosen experts, `[N, chosen, H]`, in order: over an axis one row has another order."""
    first, *others = shares.unbind(1)
    return sum(others, first)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


def _llama4(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Llama 4's chosen experts alone: `transformers` computes all, the others of inputs of 0."""
    x, experts = hidden_states.reshape(-1, module.hidden_dim), module.experts
    logits = module.router(x)[1]
    scores, chosen = torch.topk(logits, module.top_k, dim=1)
    rows = (x[:, None] * torch.sigmoid(scores)[..., None]).flatten(0, 1)
    gate, up = torch.ops.specbuild.expert_matmul(rows, experts.gate_up_proj, chosen, True).chunk(2, -1)
    outer = torch.ops.specbuild.expert_matmul(experts.act_fn(gate) * up, experts.down_proj, chosen, True)
    return module.shared_expert(x) + _in_order(outer.view(*chosen.shape, -1)), logits


@contextmanager
def own_experts(model: nn.Module) -> Iterator[None]:
    """Replace how mixtures are computed whose implementation `transformers` does not let choose, while inside."""
    with ExitStack() as undo:
        for module in model.modules():
            if type(module).__name__ == "Llama4TextMoe":
                undo.callback(module.__dict__.pop, "forward", None)
                module.forward = partial(_llama4, module)
        yield
