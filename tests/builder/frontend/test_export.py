"""The portable model and graph: what transformers computes, in one operator per layer, and the model as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from specbuild.builder.frontend.attention_layout import Layout, probe
from specbuild.builder.frontend.export import PortableModel, export, portable

Make = Callable[..., Any]
PROMPT = [5, 17, 3, 88, 42, 9, 9, 61]
TREE_TOKENS = [11, 20, 21, 30, 31, 32, 40]
TREE_PARENTS = [-1, 0, 0, 1, 1, 2, 3]
CAPACITY = 40


@pytest.fixture(scope="module")
def model(make_model: Make) -> Any:
    return make_model()


def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


def step(
    module: PortableModel,
    past: list[torch.Tensor],
    tokens: list[int],
    parents: list[int],
    start: int,
    wanted: list[int],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One sequence's nodes over a cache of `start` committed rows."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    with torch.no_grad():
        logits, present = module(
            torch.tensor([tokens]),
            torch.tensor([[start + depth for depth in depths]]),
            torch.tensor([parents], dtype=torch.int32),
            torch.tensor([start], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            torch.tensor(wanted),
            past,
        )
    return logits[0], present


def caches(model: Any) -> list[torch.Tensor]:
    layout = probe(model.config, CAPACITY)
    return [torch.zeros(1, layout.kv_heads, CAPACITY, layout.head_dim) for _ in range(2 * layout.layers)]


def as_portable(model: Any, windows: tuple[int, ...] | None = None) -> Any:
    layout = probe(model.config, CAPACITY)
    return portable(model, Layout(layout.kv_heads, layout.head_dim, windows or layout.windows), CAPACITY, CAPACITY)


def path_to(node: int) -> list[int]:
    """The tokens of a node of the tree and of its ancestors, in order."""
    return [*path_to(TREE_PARENTS[node]), TREE_TOKENS[node]] if node >= 0 else []


def test_every_node_of_a_tree_gives_its_paths_logits(model: Any) -> None:
    with as_portable(model) as module:
        chain = [node - 1 for node in range(len(PROMPT))]
        _, past = step(module, caches(model), PROMPT, chain, 0, [0])
        logits, _ = step(module, past, TREE_TOKENS, TREE_PARENTS, len(PROMPT), list(range(len(TREE_TOKENS))))
    for node in range(len(TREE_TOKENS)):
        path = path_to(node)
        torch.testing.assert_close(logits[node], reference(model, PROMPT + path)[-1], rtol=1e-4, atol=1e-4)


def state(model: Any) -> tuple[Any, ...]:
    rotation = modeling_llama.apply_rotary_pos_emb
    return model.config._attn_implementation, model.model.rotary_emb, rotation, set(model.state_dict())


@pytest.mark.parametrize("error", [False, True])
def test_the_model_is_as_it_was_afterwards(make_model: Make, error: bool) -> None:
    model = make_model(num_hidden_layers=1).train(error)
    before, logits = state(model), reference(model, PROMPT)
    with contextlib.suppress(RuntimeError), as_portable(model):
        inside = state(model)
        assert not model.training
        if error:
            raise RuntimeError("stop")
    assert inside[0] == "specbuild"
    assert inside != before
    assert (state(model), model.training) == (before, error)
    torch.testing.assert_close(reference(model, PROMPT), logits, rtol=0, atol=0)


def test_windows_count_positions(model: Any) -> None:
    """A node of a tree sees the last positions of its own path, not the last slots."""
    window = 3
    with as_portable(model, (window, window)) as module:
        chain = [node - 1 for node in range(len(PROMPT))]
        _, past = step(module, caches(model), PROMPT, chain, 0, [0])
        tree, _ = step(module, past, TREE_TOKENS, TREE_PARENTS, len(PROMPT), list(range(len(TREE_TOKENS))))
        for node in range(len(TREE_TOKENS)):
            path = path_to(node)
            text = PROMPT + path
            logits, _ = step(module, caches(model), text, list(range(-1, len(text) - 1)), 0, [len(text) - 1])
            torch.testing.assert_close(tree[node], logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_another_rotation_is_exported_as_it_is(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_: Any) -> Any:
        def turn(x: torch.Tensor) -> torch.Tensor:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

        return tuple(x * cos[:, None] + turn(x) * sin[:, None] for x in (q, k))

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved)
    model = make_model(num_hidden_layers=1)
    expected = reference(model, PROMPT)
    nodes = list(range(len(PROMPT)))
    with as_portable(model) as module:
        logits, _ = step(module, caches(model), PROMPT, [node - 1 for node in nodes], 0, nodes)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    graph = export(model, probe(model.config, CAPACITY), CAPACITY, CAPACITY)
    assert not [node for node in graph.graph if node.op_type == "RotaryEmbedding"]
