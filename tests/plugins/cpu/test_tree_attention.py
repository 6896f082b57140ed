"""TreeAttention on a CPU: what it computes, and that a node's bits depend on its own path alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper

SLOTS, CAPACITY = 2, 96


@dataclass
class Layer:
    """A drawn layer, and its caches."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int
    softcap: float
    rotated: int  # numbers of a head, halved
    packed: bool
    sinks: bool
    seed: int
    keys: NDArray[np.float32] = field(init=False)
    values: NDArray[np.float32] = field(init=False)

    def __post_init__(self):
        chance = np.random.default_rng(self.seed)
        self.keys = np.zeros((SLOTS, self.kv_heads, CAPACITY, self.key_size), np.float32)
        self.values = np.zeros((SLOTS, self.kv_heads, CAPACITY, self.value_size), np.float32)
        angles = chance.random((CAPACITY, self.rotated)) * 6
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.sink = chance.standard_normal(self.heads).astype(np.float32)
        self.sizes = self.heads * self.key_size, self.kv_heads * self.key_size, self.kv_heads * self.value_size

    def feeds(
        self,
        numbers,  # [T, query, key and value]
        places,  # slot, row and position of each node
        committed,
        visible,
        row_positions,
    ):
        """The inputs in order; None for one that this layer leaves out."""
        query, key, value = np.split(numbers[None], np.cumsum(self.sizes)[:2], -1)
        slots, rows, positions = np.array(places, np.int32).reshape(-1, 3).T
        return {
            "query": numbers[None] if self.packed else query,
            "key": None if self.packed else key,
            "value": None if self.packed else value,
            "keys": self.keys,
            "values": self.values,
            "slots": slots,
            "rows": rows,
            "committed": np.array(committed, np.int32),
            "visible": visible,
            "positions": positions[None].astype(np.int64),
            "cos": self.cos if self.rotated else None,
            "sin": self.sin if self.rotated else None,
            "row_positions": row_positions if self.window else None,
            "sinks": self.sink if self.sinks else None,
        }

    def session(self, operator):
        numbers = np.zeros((1, sum(self.sizes)), np.float32)
        example = self.feeds(numbers, [(0, 0, 0)], [0] * SLOTS, np.ones((1, 1), bool), np.zeros((1, 1), np.int32))
        inputs = {
            name: None if each is None else (helper.np_dtype_to_tensor_dtype(each.dtype), [None] * each.ndim)
            for name, each in example.items()
        }
        attributes = {
            name: getattr(self, name) for name in ("heads", "kv_heads", "key_size", "value_size", "window", "softcap")
        }
        return operator("TreeAttention", inputs, scale=self.key_size**-0.5, **attributes)

    def step(self, session, *arguments):
        """Run on `feeds` of these arguments, over the caches' own memory."""
        binding = session.io_binding()
        for name, each in self.feeds(*arguments).items():
            if each is not None:
                value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(each))
                binding.bind_ortvalue_input(name, value)
        for output in session.get_outputs():
            binding.bind_output(output.name)
        session.run_with_iobinding(binding)
        found = [each[0] for each in binding.copy_outputs_to_cpu()]
        return found


@st.composite
def layers(draw):
    kv_heads, key_size = draw(st.integers(1, 3)), draw(st.sampled_from([8, 20, 24, 64, 80, 128]))
    return Layer(
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        key_size=key_size,
        value_size=draw(st.sampled_from([key_size, 40])),
        window=draw(st.sampled_from([0, 0, 5, 30, -5, -16])),  # −c: chunks
        softcap=draw(st.sampled_from([0.0, 0.0, 20.0])),
        rotated=draw(st.sampled_from([0, key_size // 4, key_size // 2])),
        packed=draw(st.booleans()),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
    )


@pytest.mark.slow
@settings(max_examples=30)
@given(layers(), st.data())
def test_a_nodes_bits_depend_on_its_own_path_alone(operator, layer, data):
    chance, session = np.random.default_rng(layer.seed), layer.session(operator)
    prompt, nodes = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 12))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(nodes)]
    paths = list[list[int]]()
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    numbers = chance.standard_normal((prompt + nodes, sum(layer.sizes))).astype(np.float32)
    row_positions = np.tile(np.arange(CAPACITY, dtype=np.int32), (SLOTS, 1))
    alone, tree = 0, 1  # slots

    def read(slot, first, last):
        """Read a part of the prompt in one step."""
        places = [(slot, row, row) for row in range(first, last)]
        committed = [first if each == slot else 0 for each in range(SLOTS)]
        triangle = np.tri(last - first, dtype=bool)
        layer.step(session, numbers[first:last], places, committed, triangle, row_positions)

    cut = data.draw(st.integers(0, prompt))
    read(tree, 0, cut)
    read(tree, cut, prompt)
    for row in range(prompt):
        read(alone, row, row + 1)
    visible = np.zeros((nodes, nodes), bool)
    for node, path in enumerate(paths):
        visible[node, path] = True
        row_positions[tree, prompt + node] = prompt + len(path) - 1
    places = [(tree, prompt + node, prompt + len(path) - 1) for node, path in enumerate(paths)]
    together = layer.step(session, numbers[prompt:], places, [0, prompt], visible, row_positions)
    for node, path in enumerate(paths):
        for row, each in enumerate(path, prompt):
            one = layer.step(
                session,
                numbers[prompt + each][None],
                [(alone, row, row)],
                [row, 0],
                np.ones((1, 1), bool),
                row_positions,
            )
        for found, expected in zip(together, one, strict=True):
            assert np.array_equal(found[node], expected[0])
        assert all(np.array_equal(each[node], together[0][node]) for each in together), "sets of instructions differ"


@settings(max_examples=20)
@given(layers(), st.integers(1, 40))
def test_attention_is_the_weighted_mean_of_the_values(operator, layer, length):
    numbers = np.random.default_rng(layer.seed).standard_normal((length, sum(layer.sizes))).astype(np.float32)
    positions, seen = np.arange(length), np.tri(length, dtype=bool)
    row_positions = np.tile(np.arange(CAPACITY, dtype=np.int32), (SLOTS, 1))
    places = [(1, row, row) for row in range(length)]
    found = layer.step(layer.session(operator), numbers, places, [0, 0], seen, row_positions)[0]
    if layer.window > 0:
        seen = seen & (positions[:, None] - positions < layer.window)
    if layer.window < 0:
        seen = seen & (positions[:, None] // -layer.window == positions // -layer.window)
    query, key, value = np.split(numbers.astype(np.float64), np.cumsum(layer.sizes)[:2], -1)
    query, key = (_rotate(layer, each.reshape(length, -1, layer.key_size)) for each in (query, key))
    value = value.reshape(length, layer.kv_heads, layer.value_size)
    for head in range(layer.heads):
        kv_head = head // (layer.heads // layer.kv_heads)
        scores = query[:, head] @ key[:, kv_head].T * layer.key_size**-0.5
        if layer.softcap:
            scores = layer.softcap * np.tanh(scores / layer.softcap)
        weights = np.exp(np.where(seen, scores, -np.inf))
        total = weights.sum(-1, keepdims=True) + (np.exp(layer.sink[head]) if layer.sinks else 0)
        part = slice(head * layer.value_size, (head + 1) * layer.value_size)
        np.testing.assert_allclose(found[:, part], weights / total @ value[:, kv_head], atol=2e-5)


def _rotate(layer, x):
    """Rotate heads `[T, heads, size]`, node t to position t."""
    cos, sin, half = layer.cos[: len(x), None], layer.sin[: len(x), None], layer.rotated
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)
