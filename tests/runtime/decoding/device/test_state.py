"""What a device knows of its sequences is what the host wrote, and nothing is sent or captured twice."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_requests import prompt_of, request_of
from host_device import HostDevice
from tiny_models import VOCAB

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.gpu.device import Tensor, TreeInputs, slot_parts
from specbuild.runtime.backends.kernels.abi import Dtype, Mask, Request, Shape, Walk
from specbuild.runtime.decoding.device.state import (
    MAX_GRAPHS,
    UNCAPTURABLE,
    Block,
    Graphs,
    ProcessorFlags,
    Slots,
    enqueue_tree_inputs,
    launch,
    layer_addresses,
    round_block,
)
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.tree import TreeSpec

FIELDS: dict[str, Any] = {"odd": ((3,), np.uint8), "pairs": ((2, 2), np.int32), "one": ((1,), np.float64)}


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


@pytest.fixture
def stream(device: HostDevice) -> int:
    return device.stream()


def decoding(slot: int, **fields: Any) -> Sequence:
    """A sequence in a slot, whose prompt of five tokens is in the cache but for the last one."""
    sequence = request_of(prompt_of(slot, 5), seed=100 + slot, **{"speculation": "off"} | fields)
    sequence.slot, sequence.cached = slot, 4
    return sequence


class Noted:
    """Kernels that note what they are launched with."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any, int]] = []

    def launch(self, name: str, params: ctypes.Structure, stream: int = 0) -> None:
        self.seen.append((name, params, stream))

    def workspace(self, params: Any) -> int:
        return 0


def test_a_blocks_fields_lie_one_after_another_each_aligned(device: HostDevice) -> None:
    block = Block(device, FIELDS)
    starts = [tensor.address - block.at["odd"].address for tensor in block.at.values()]
    assert (list(block.at), starts) == (["odd", "pairs", "one"], [0, 16, 32])
    for name, (shape, dtype) in FIELDS.items():
        assert (block.at[name].shape, block.at[name].dtype) == (shape, dtype)
        assert (block.host[name].shape, block.host[name].dtype) == (shape, dtype)


def test_a_blocks_fields_travel_alone_or_together(device: HostDevice, stream: int) -> None:
    block = Block(device, FIELDS)
    there = {name: device.array(tensor) for name, tensor in block.at.items()}
    block.host["odd"][:], block.host["pairs"][:], block.host["one"][:] = 7, [[1, 2], [3, 4]], 0.5
    block.upload("pairs", "pairs", stream)
    assert not there["pairs"].any(), "it is only enqueued"
    device.wait(stream)
    assert there["pairs"].tolist() == [[1, 2], [3, 4]]
    assert not there["odd"].any()
    assert not there["one"].any()
    there["pairs"][:], there["one"][:] = 9, 2.5
    block.download("odd", "pairs", stream)
    device.wait(stream)
    assert (block.host["odd"].tolist(), block.host["pairs"].tolist()) == ([0, 0, 0], [[9, 9], [9, 9]])
    assert block.host["one"] == 0.5


def test_a_row_of_a_field_travels_alone(device: HostDevice, stream: int) -> None:
    block = Block(device, FIELDS)
    block.host["pairs"][:] = [[1, 2], [3, 4]]
    block.upload_row("pairs", 1, stream)
    device.wait(stream)
    assert device.array(block.at["pairs"]).tolist() == [[0, 0], [3, 4]]


def test_a_round_takes_what_comes_first_and_gives_the_rest(device: HostDevice, stream: int) -> None:
    executor: Any = SimpleNamespace(device=device, batch_size=2)
    block = round_block(executor, 4)
    assert list(block.at) == ["tokens", "parents", "node_rows", "counts", "fault", "length", "emitted", "path"]
    assert {tensor.shape for tensor in block.at.values()} == {(2,), (2, 4)}
    for name in block.host:
        block.host[name][:] = 5
    block.upload("tokens", "counts", stream)
    device.wait(stream)
    assert [bool(device.array(tensor).any()) for tensor in block.at.values()] == [True] * 4 + [False] * 4


def test_every_layers_keys_and_values_are_told(device: HostDevice, stream: int) -> None:
    cache = device.empty((6, 2, 3, 5, 4), np.float16)
    executor: Any = SimpleNamespace(device=device, model=SimpleNamespace(cache=cache), stream=stream)
    told = device.array(layer_addresses(executor))
    assert told.dtype == np.uint64
    assert told.tolist() == [part.address for part in slot_parts(cache)]


def test_a_kernel_gets_addresses_and_what_is_not_named_is_nothing() -> None:
    kernels, tokens = Noted(), Tensor(1 << 33, (2, 4), np.dtype(np.int32))
    launch(kernels, "walk_tree", 3, tokens=tokens, parents=None, batch=2)
    ((name, params, stream),) = kernels.seen
    assert (name, type(params), stream) == ("walk_tree", Walk, 3)
    assert (params.tokens, params.parents, params.counts, params.batch, params.nodes) == (1 << 33, None, None, 2, 0)


def test_masks_are_told_one_for_each_window(device: HostDevice, stream: int) -> None:
    tensors = {name: device.empty((2, 8), np.int32) for name in ("positions", "rows", "parents", "counts", "cache_len")}
    masks = {window: device.empty((2, 1, 8, 20), np.bool_) for window in (0, 7)}
    model = SimpleNamespace(masks=masks, tree=None, positions=tensors["positions"], rows=tensors["rows"])
    spec = SimpleNamespace(capacity=20)
    executor: Any = SimpleNamespace(model=model, device=device, stream=stream, batch_size=2, spec=spec)
    kernels, fields = Noted(), {name: tensors[name] for name in ("parents", "counts")}
    enqueue_tree_inputs(kernels, executor, tensors["cache_len"], 4, shift=-1, tree_nodes=8, **fields)
    assert [(name, params.window, params.output) for name, params, _ in kernels.seen] == [
        ("tree_mask", window, mask.address) for window, mask in masks.items()
    ]
    for _, params, at in kernels.seen:
        assert isinstance(params, Mask)
        assert (params.batch, params.nodes, params.tree_nodes, params.capacity) == (2, 4, 8, 20)
        assert (params.shift, params.dtype, at) == (-1, Dtype.BOOL, stream)
        assert (params.positions, params.rows) == (tensors["positions"].address, tensors["rows"].address)
        assert (params.cache_len, params.tree_offset) == (tensors["cache_len"].address, None)


@pytest.mark.parametrize("offset", [None, [3, 0]])
def test_tree_attention_gets_the_trees_themselves(device: HostDevice, stream: int, offset: list[int] | None) -> None:
    """Trees as wide as they are grown go into rows of 64 nodes; without an offset it stays as it is."""
    one = [device.empty((2,), np.int32) for _ in range(3)]
    tree = TreeInputs(device.empty((2, 64), np.int32), *one)
    model, spec = SimpleNamespace(masks={}, tree=tree), SimpleNamespace(capacity=20)
    executor: Any = SimpleNamespace(model=model, device=device, stream=stream, batch_size=2, spec=spec)
    given = {"parents": [[-1, 0, 1], [-1, -1, 0]], "counts": [3, 2], "cache_len": [9, 8]}
    given |= {} if offset is None else {"tree_offset": offset}
    tensors = {name: device.empty(np.shape(values), np.int32) for name, values in given.items()}
    for name, values in given.items():
        device.array(tensors[name])[...] = values
    kernels, cache_len = Noted(), tensors.pop("cache_len")
    enqueue_tree_inputs(kernels, executor, cache_len, 4, tree_nodes=3, shift=1, **tensors)
    device.wait(stream)
    ((_, params, _),) = kernels.seen
    assert (params.output, params.rows, params.shift) == (None, tree.cache_len.address, 1)
    assert device.array(tree.parents)[:, :4].tolist() == [[-1, 0, 1, 0], [-1, -1, 0, 0]]
    assert device.array(tree.counts).tolist() == [3, 2]
    assert device.array(tree.tree_offset).tolist() == (offset or [0, 0])


@pytest.fixture
def graphs(device: HostDevice, stream: int) -> Callable[[bool], Graphs]:
    """`graphs(capturable)`: of an executor whose model's steps can be captured, or not."""

    def make(capturable: bool) -> Graphs:
        executor: Any = SimpleNamespace(device=device, stream=stream, model=SimpleNamespace(capturable=capturable))
        executor.timed = lambda enqueue: enqueue()
        return Graphs(executor)

    return make


def test_a_first_use_enqueues_and_the_second_captures_for_all_that_follow(
    device: HostDevice, stream: int, graphs: Callable[[bool], Graphs]
) -> None:
    """What a first use loads or allocates may be in no capture."""
    made, ran, called = graphs(True), list[int](), list[int]()

    def enqueue(key: int) -> None:
        called.append(key)
        device.run(stream, lambda: ran.append(key))

    for key, captured in ((1, 0), (2, 0), (1, 1), (1, 1), (2, 2), (1, 2)):
        made.run(key, lambda key=key: enqueue(key))  # type: ignore[misc]
        assert device.captured == captured
    device.wait(stream)
    assert ran == [1, 2, 1, 1, 2, 1]
    assert called == [1, 2, 1, 2], "once as it is, once for the graph"
    made.clear()
    for captured in (2, 3):
        made.run(1, lambda: enqueue(1))
        assert device.captured == captured


def test_no_more_graphs_are_kept_than_so_many(device: HostDevice, graphs: Callable[[bool], Graphs]) -> None:
    made = graphs(True)
    for _ in range(3):
        for key in range(MAX_GRAPHS):
            made.run(key, lambda: None)
    assert device.captured == MAX_GRAPHS
    for key in (MAX_GRAPHS, 0, MAX_GRAPHS, 0):  # all others are dropped for it
        made.run(key, lambda: None)
    assert device.captured == MAX_GRAPHS + 2


def test_what_cannot_be_captured_is_called_and_that_is_said_once(
    device: HostDevice, graphs: Callable[[bool], Graphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = list[str]()
    for made in (graphs(False), graphs(False)):
        for _ in range(2):
            made.run("key", lambda: called.append("not captured"))
    assert (called, device.captured) == (["not captured"] * 4, 0)
    assert device.uncaptured == [UNCAPTURABLE]
    monkeypatch.setattr(nvtx, "enabled", True)  # a profiler's ranges are the host's
    made = graphs(True)
    for _ in range(2):
        made.run("key", lambda: called.append("profiled"))
    assert (called[4:], device.captured) == (["profiled"] * 2, 0)


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ({}, (False, False, False)),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, (False, False, False)),  # greedy: nothing is cut off
        ({"temperature": 1.0, "top_k": 5}, (True, False, False)),
        ({"temperature": 1.0, "min_p": 0.1}, (True, False, False)),
        ({"repetition_penalty": 1.1}, (False, True, False)),
        ({"presence_penalty": -0.5}, (False, True, False)),
        ({"logit_bias": {3: 1.0}}, (False, False, True)),
    ],
)
def test_a_graph_has_what_any_of_its_sequences_asks_for(asked: dict[str, Any], flags: tuple[bool, bool, bool]) -> None:
    one, other = SamplingParams(**asked), SamplingParams(temperature=0.5, top_p=0.9)
    assert ProcessorFlags.of([one]) == ProcessorFlags(*flags)
    assert ProcessorFlags.of([one, other]) == ProcessorFlags(True, *flags[1:])
    assert ProcessorFlags.of([]) == ProcessorFlags(False, False, False)


def request_in(slots: Slots, device: HostDevice, slot: int) -> Request:
    return Request.from_buffer_copy(device.array(slots.at["requests"])[slot].tobytes())


def test_a_sequences_text_and_request_are_on_the_device(device: HostDevice, stream: int) -> None:
    slots, spec = Slots(device, 3, VOCAB), TreeSpec.parse("topk:2,3")
    plain = decoding(0)
    drafts = decoding(2, temperature=0.5, top_p=0.25, min_p=0.125, top_k=7, repetition_penalty=1.5)
    slots.update([(plain, None), (drafts, spec)], stream)
    device.wait(stream)
    assert device.array(slots.at["cache_len"]).tolist() == [4, 1, 4]  # slot 1 decodes nothing
    for sequence in (plain, drafts):
        assert device.array(slots.at["pair"])[sequence.slot].tolist() == sequence.tokens[-2:]
        assert device.array(slots.at["roots"])[sequence.slot] == sequence.tokens[-1]
    request = request_in(slots, device, 2)
    assert (request.seed, request.temperature, request.top_p, request.top_k) == (102, 0.5, 0.25, 7)
    assert (request.min_p_log, request.repetition) == (math.log(0.125), 1.5)
    assert request_in(slots, device, 0).min_p_log == -math.inf
    growths = [Shape.from_buffer_copy(row.tobytes()) for row in device.array(slots.at["growths"])]
    assert [(g.branch, g.width, g.expand, g.depth, g.nodes) for g in growths] == [
        (0, 0, 0, 0, 0),
        (0, 0, 0, 0, 0),
        (2, 2, 2, 3, 6),
    ]


def test_what_is_known_is_not_sent_again(device: HostDevice, stream: int) -> None:
    """From a sequence's second round on the device's own state is newer than the host's."""
    slots, sequence, spec = Slots(device, 2, VOCAB), decoding(1), TreeSpec.parse("chain:2")
    slots.update([(sequence, spec)], stream)
    device.wait(stream)
    device.array(slots.at["roots"])[:] = 77
    slots.update([(sequence, spec)], stream)
    assert device._streams[stream] == []
    slots.update([(sequence, None)], stream)  # it drafts no more
    device.wait(stream)
    assert not device.array(slots.at["growths"]).any()
    assert device.array(slots.at["roots"])[1] == sequence.tokens[-1]


@pytest.mark.parametrize(("rows", "length"), [(0, 1), (1, 1), (9, 9)])
def test_a_slot_that_is_held_grows_nothing_behind_its_rows(
    device: HostDevice, stream: int, rows: int, length: int
) -> None:
    """Two nodes are run from the row before `length` on, so there is one."""
    slots, one, other = Slots(device, 2, VOCAB), decoding(0), decoding(1)
    spec = TreeSpec.parse("chain:2")
    slots.update([(one, spec), (other, spec)], stream)
    slots.hold(0, rows)
    slots.update([(other, spec)], stream)
    device.wait(stream)
    assert device.array(slots.at["cache_len"]).tolist() == [length, 4]
    assert [bool(row.any()) for row in device.array(slots.at["growths"])] == [False, True]


def test_histories_and_biases_are_made_when_the_first_sequence_asks(device: HostDevice, stream: int) -> None:
    """Bit 31 of a token that is in the text, and how often it is in the output; a bias at V times its slot."""
    slots, plain = Slots(device, 2, VOCAB), decoding(0)
    slots.update([(plain, None)], stream)
    found = slots.choosing(ProcessorFlags.of([plain.params]))
    assert (found["history"], found["bias_tokens"], found["cut_offs"], found["vocab"]) == (None, None, 0, VOCAB)
    asks = decoding(1, frequency_penalty=0.5, logit_bias={30: -2.0, 4: 1.5}, temperature=1.0, top_k=3)
    for token in (8, 8, 9):
        asks.emit(token, frozenset())
    slots.update([(plain, None), (asks, None)], stream)
    device.wait(stream)
    found = slots.choosing(ProcessorFlags.of([plain.params, asks.params]))
    assert found["cut_offs"] == 1
    counts = np.zeros((2, VOCAB), np.uint32)
    counts[1, [8, 9]] = 2, 1
    counts[1, asks.tokens] |= np.uint32(1 << 31)
    np.testing.assert_array_equal(device.array(found["history"]), counts)
    assert [device.array(found[name])[1, :2].tolist() for name in ("bias_tokens", "bias_values")] == [
        [4, 30],
        [1.5, -2.0],
    ]
    request = request_in(slots, device, 1)
    assert (request.bias_begin, request.bias_end) == (VOCAB, VOCAB + 2)
