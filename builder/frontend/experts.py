"""Mixtures of experts at export: one operator for the products of rows with the weights that they chose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
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
    first, *others = (outer.view(tokens, chosen, -1) * top_k_weights[..., None]).unbind(1)
    return sum(others, first).to(hidden_states.dtype)  # in order: a sum over an axis has another one for one row


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
