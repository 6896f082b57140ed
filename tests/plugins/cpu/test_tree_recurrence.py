"""TreeRecurrence on a CPU: what it computes, and that a node's bits depend on its own path alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnxruntime
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from specbuild.runtime.backends.cpu.kv_cache import KVCache
from specbuild.runtime.bundle.manifest import CacheShape

SLOTS, CAPACITY = 3, 40


@dataclass(frozen=True)
class Recurrence:
    """A drawn layer: H heads of values, G of keys, of these sizes."""

    heads: int
    groups: int
    size: int
    columns: int
    many_decays: bool
    delta: bool
    seed: int

    def tokens(self, count):
        """What so many random tokens give to it."""
        chance = np.random.default_rng(self.seed)
        decays = (count, self.heads, *([self.size] * self.many_decays))
        query, key = (chance.standard_normal((count, self.groups, self.size)) / self.size for _ in range(2))
        value, beta = chance.standard_normal((count, self.heads, self.columns)), chance.random((count, self.heads))
        found = (query, key, value, np.exp(-chance.random(decays)), beta)
        return [each.astype(np.float32) for each in found]

    def cache(self):
        gates = self.heads * (self.size if self.many_decays else 1) + self.heads
        columns = self.heads * self.columns
        return KVCache([CacheShape(1, self.groups * self.size + gates, columns, columns * self.size)], SLOTS, CAPACITY)

    def outputs(self, tokens):
        """Each token's output, by the definition, in float64."""
        query, key, value, decay, beta = (each.astype(np.float64) for each in tokens)
        query, key = (each.repeat(self.heads // self.groups, 1) for each in (query, key))
        state, found = np.zeros((self.heads, self.size, self.columns)), []
        for q, k, v, d, b in zip(query, key, value, decay, beta, strict=True):
            state = state * d.reshape(self.heads, -1, 1)
            known = np.einsum("hk,hkv->hv", k, state) * self.delta
            state = state + k[:, :, None] * (b[:, None] * (v - known))[:, None]
            found.append(np.einsum("hk,hkv->hv", q, state))
        return np.array(found)


class Layer:
    """A session of a recurrence over a cache, driven as an executor drives it."""

    def __init__(self, operator, recurrence):
        self.recurrence, self.cache = recurrence, recurrence.cache()
        feeds = self._feeds(recurrence.tokens(1), [(0, 0)], [0] * SLOTS, np.ones((1, 1), bool))
        kinds = {
            name: (helper.np_dtype_to_tensor_dtype(each.dtype), [None] * each.ndim) for name, each in feeds.items()
        }
        self.session = operator("TreeRecurrence", kinds, sets=(-1,), delta=int(recurrence.delta))

    def _feeds(self, tokens, places, committed, visible):
        named = dict(zip(("query", "key", "value", "decay", "beta"), (each[None] for each in tokens), strict=True))
        slots, rows = np.array(places, np.int32).reshape(-1, 2).T
        keys, values = self.cache.views
        named |= {"states": self.cache.states[0], "keys": keys, "values": values, "slots": slots, "rows": rows}
        committed = np.array(committed, np.int32)
        return named | {"committed": committed, "visible": visible, "state_rows": self.cache.state_rows}

    def step(self, tokens, places, committed, visible):
        for slot in {slot for slot, _ in places}:
            self.cache.rewind(slot, committed[slot])
        binding = self.session.io_binding()
        for name, each in self._feeds(tokens, places, committed, visible).items():
            if name not in ("states", "keys", "values"):  # written in place
                each = np.ascontiguousarray(each)
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(each))
        (output,) = self.session.get_outputs()
        binding.bind_output(output.name)
        self.session.run_with_iobinding(binding)
        for slot in {slot for slot, _ in places}:
            self.cache.state_rows[slot] = committed[slot]
        return binding.copy_outputs_to_cpu()[0][0]

    def chain(self, tokens, slot, start):
        """Give a slot tokens after so many committed ones, in one step."""
        count = len(tokens[0])
        committed = [start if each == slot else 0 for each in range(SLOTS)]
        return self.step(tokens, [(slot, start + node) for node in range(count)], committed, np.tri(count, dtype=bool))


recurrences = st.builds(
    lambda groups, times, **others: Recurrence(heads=groups * times, groups=groups, **others),
    st.integers(1, 3),
    st.integers(1, 3),
    size=st.sampled_from([3, 8, 20]),
    columns=st.sampled_from([4, 12, 32, 40]),
    many_decays=st.booleans(),
    delta=st.booleans(),
    seed=st.integers(0, 2**32),
)


def picked(tokens, indices):
    return [each[list(indices)] for each in tokens]


@settings(max_examples=25)
@given(recurrences, st.data())
def test_it_computes_the_recurrence_of_its_definition(operator, recurrence, data):
    length = data.draw(st.integers(1, CAPACITY))
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))})
    tokens, layer = recurrence.tokens(length), Layer(operator, recurrence)
    parts = [layer.chain(picked(tokens, range(*part)), 1, part[0]) for part in pairwise(cuts)]
    np.testing.assert_allclose(np.concatenate(parts), recurrence.outputs(tokens), atol=2e-5)


@settings(max_examples=25)
@given(recurrences, st.data())
def test_a_nodes_bits_are_those_of_single_steps_over_its_path(operator, recurrence, data):
    """A tree in two steps after drafts that were rejected and a text that was taken back."""
    prompt, nodes = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 10))
    cut, back = data.draw(st.integers(0, prompt)), data.draw(st.integers(0, nodes))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(nodes)]
    visible, tokens = np.eye(nodes, dtype=bool), recurrence.tokens(prompt + nodes)
    for node, parent in enumerate(parents):
        visible[node] |= parent >= 0 and visible[parent]
    tree, other, alone = 0, 1, 2  # slots
    layer = Layer(operator, recurrence)
    layer.chain(picked(tokens, range(cut)), tree, 0)
    for draft in range(data.draw(st.integers(0, 2))):  # rejected
        layer.chain(picked(tokens, [draft] * 3), tree, cut)
    layer.chain(picked(tokens, range(cut, prompt)), tree, cut)
    layer.chain(picked(tokens, [0]), tree, prompt)  # whose step makes the states those of the whole prompt
    if data.draw(st.booleans()):  # as a prefix of another text's
        layer.cache.copy(other, tree, prompt)
        tree = other
    committed = [prompt if slot == tree else 0 for slot in range(SLOTS)]
    if data.draw(st.booleans()) and prompt:  # taken back, and read again
        layer.chain(picked(tokens, range(prompt - 1, prompt)), tree, prompt - 1)
    parts = []
    for first, last in pairwise(sorted({0, back, nodes})):
        places = [(tree, prompt + node) for node in range(first, last)]
        given_tokens = picked(tokens, range(prompt + first, prompt + last))
        parts.append(layer.step(given_tokens, places, committed, visible[first:last, :last]))
    together = np.concatenate(parts)
    for node in range(nodes):
        path = [*range(prompt), *(prompt + np.flatnonzero(visible[node]))]
        for row, each in enumerate(path):
            (one,) = layer.chain(picked(tokens, [each]), alone, row)
        assert np.array_equal(together[node], one)
        layer.cache.rewind(alone, 0)
