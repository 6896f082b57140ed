"""The portable model and graph: what transformers computes, in one operator per layer, and the model as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import reference
from transformers.models.llama import modeling_llama

from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.export import PortableModel, portable

Make = Callable[..., Any]
PROMPT = [5, 17, 3, 88, 42, 9, 9, 61]
TREE_TOKENS = [11, 20, 21, 30, 31, 32, 40]
TREE_PARENTS = [-1, 0, 0, 1, 1, 2, 3]
CAPACITY = 40


@pytest.fixture(scope="module")
def model(make_model: Make) -> Any:
    return make_model()


def step(
    module: PortableModel, past: list[torch.Tensor], tokens: list[int], parents: list[int], start: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One sequence's nodes over a cache of `start` committed rows."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    positions = torch.tensor([[start + depth for depth in depths]])
    place = (torch.tensor(each, dtype=torch.int32) for each in ([parents], [start], [0]))
    with torch.no_grad():
        logits, present = module(torch.tensor([tokens]), positions, *place, torch.arange(len(tokens)), past)
    return logits[0], present


def test_every_node_of_a_tree_gives_its_paths_logits(model: Any) -> None:
    layout = probe(model.config, CAPACITY)
    past = [torch.zeros(1, layout.kv_heads, CAPACITY, layout.head_dim) for _ in range(2 * layout.layers)]
    with portable(model, layout, CAPACITY, CAPACITY) as module:
        _, past = step(module, past, PROMPT, list(range(-1, len(PROMPT) - 1)), 0)
        logits, _ = step(module, past, TREE_TOKENS, TREE_PARENTS, len(PROMPT))
    paths: list[list[int]] = []
    for token, parent, row in zip(TREE_TOKENS, TREE_PARENTS, logits, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else PROMPT), token])
        np.testing.assert_allclose(row, reference(model, paths[-1])[-1], rtol=1e-4, atol=1e-4)


def state(model: Any) -> tuple[Any, ...]:
    rotation = modeling_llama.apply_rotary_pos_emb
    return model.config._attn_implementation, model.model.rotary_emb, rotation, set(model.state_dict())


@pytest.mark.parametrize("error", [False, True])
def test_the_model_is_as_it_was_afterwards(make_model: Make, error: bool) -> None:
    model = make_model(num_hidden_layers=1).train(error)
    before, logits = state(model), reference(model, PROMPT)
    with contextlib.suppress(RuntimeError), portable(model, probe(model.config, CAPACITY), CAPACITY, CAPACITY):
        assert state(model) != before
        assert not model.training
        if error:
            raise RuntimeError("stop")
    assert (state(model), model.training) == (before, error)
    np.testing.assert_array_equal(reference(model, PROMPT), logits)
