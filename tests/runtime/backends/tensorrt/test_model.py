"""What a context is given, and what it may be asked; engines run in tests/test_card_bundles.py and on GPUs."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from host_device import HostDevice

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.device import Tensor
from specbuild.runtime.backends.gpu.tensors import expected_tensors
from specbuild.runtime.backends.tensorrt.model import TrtModel
from specbuild.runtime.backends.tensorrt.pages import PageTable
from specbuild.runtime.bundle.manifest import EngineRecord
from specbuild.runtime.errors import BundleError, ExecutionError

HEADS, HEAD_DIM, VOCAB, CHUNK = 2, 64, 64, 8


class Bound:
    """A context that notes what it is given; TensorRT wants addresses that are multiples of 256."""

    def __init__(self):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.ran: list[tuple[int, ...]] = []

    def set_input_shape(self, name, shape):
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name, address):
        assert address % 256 == 0, name
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        self.ran.append(self.shapes["input_ids"])
        return True


class NoGpu(HostDevice):
    """A host's memory at addresses such as CUDA gives."""

    current = contextlib.nullcontext()

    def pinned(self, shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = super().pinned((size + 256,), np.uint8)
        return memory[-memory.ctypes.data % 256 :][:size].view(dtype).reshape(shape)


class NoPlan:
    """A plan over paged caches of which only the record and the tensors are there."""

    scratch_bytes = 256
    spec = ModelSpec("toy", 1, HEADS, HEAD_DIM, VOCAB, 96, CHUNK)

    def __init__(self):
        nodes = (((4, 4, 4), (4, 64, 64)), ((5, 8, 8), (0, 0, 0)))
        self.profiles = [{"batch": (1, 1, 3), "pages": (1, 19, 19), "nodes": n, "tree": tree} for n, tree in nodes]
        named = zip(("nodes4", "prompt"), self.profiles, strict=True)
        listed = {which: {name: list(s) for name, s in each.items()} for which, each in named}
        self.record = EngineRecord("10.15", ["89"], "plugin", "1", False, None, 0, listed, "auto", 16)
        self.tensors = expected_tensors(self.spec, "HALF", "plugin", 16)
        self.contexts: list[Bound] = []

    def context(self, *_, **__):
        self.contexts.append(Bound())
        return self.contexts[-1]

    def call(self, method, *arguments):
        assert method(*arguments)

    def keep_compiled(self):
        self.kept = [list(context.ran) for context in self.contexts]


def model_of(plan, device=None, pages=(3, 96, 16, 11)):
    """Over pages of its own, or over these."""
    device = device or NoGpu()
    table = PageTable(device, *pages)
    return TrtModel(plan, plan.spec, device, 3, pages=table)


def test_a_context_is_made_when_it_is_first_needed():
    """The largest step runs at once; of one slot the few lengths that a prompt's chunk is padded to, when they come."""
    plan = NoPlan()
    model = model_of(plan)
    assert model.lengths == (4, 6, 8)
    assert plan.kept == [[(3, 4)]]
    for nodes in (4, 8, 6, 8):
        model.prefill(0, nodes, nodes - 1, 1)
    assert plan.kept == [[(3, 4)], [(1, 4)], [(1, 8), (1, 6)]], "after each shape's first step, which compiles"
    with pytest.raises(ExecutionError, match="a step of one slot has 4, 6, 8 nodes, not 5"):
        model.prefill(0, 5, 4, 1)


def test_none_is_made_while_a_graph_is_captured():
    device = NoGpu()
    model, stream = model_of(NoPlan(), device), device.stream()
    with pytest.raises(ExecutionError, match="a step of the toy has not run yet: it cannot be captured"):
        device.graph(lambda: model.prefill(0, 4, 3, stream), stream)


@pytest.mark.parametrize("says", [None, True, False])
def test_whether_a_graph_may_hold_a_step_is_the_engines_word(monkeypatch, says):
    """TensorRT-RTX has such a word, TensorRT has none."""
    if says is not None:
        monkeypatch.setattr(Bound, "is_stream_capturable", lambda self, stream: says, raising=False)
    assert model_of(NoPlan()).capturable == (says is not False)


def test_pages_are_bound():
    """All of the table for a step of all slots, a slot's own row for its prompts; all pages, wherever a slot's lie."""
    plan, device = NoPlan(), NoGpu()
    model = model_of(plan, device)
    table = model.pages
    assert model.tensors.cache.shape == (2, 12, HEADS, 16, 64)
    table.take(2, 2, 0, 40)
    table.update(device.stream())
    model.prefill(2, 8, 7, 1)
    page = 12 * HEADS * 16 * 64 * 2
    for context, batch in ((plan.contexts[0], 3), (plan.contexts[-1], 1)):
        assert context.shapes["past_key.0"] == context.shapes["past_value.0"] == (12, HEADS, 16, 64)
        assert context.shapes["page_table"] == (batch, 6)
        assert context.addresses["past_key.0"] == context.addresses["present_key.0"] == model.tensors.cache.address
        assert context.addresses["past_value.0"] == model.tensors.cache.address + page
        found = device.array(Tensor(context.addresses["page_table"], (batch, 6), np.dtype(np.int32)))
        np.testing.assert_array_equal(found, table.table[3 - batch :])
    assert found[0, :3].all()
    for other in ((3, 96, 32, 11), (3, 112, 16, 11)):
        with pytest.raises(BundleError, match="the toy's pages are not those of the other model: build the bundle"):
            model_of(plan, pages=other)
