"""The state of the sequences that a device decodes, one slot each, and how it is uploaded."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from specbuild.runtime.backends import nvtx
from specbuild.runtime.backends.gpu.device import Device, Step, Tensor, slot_parts
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.kernels.abi import LAUNCHERS, Dtype, Request, Shape
from specbuild.runtime.backends.kernels.interface import Kernels
from specbuild.runtime.decoding.loop import alone
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.constraint import tree_masks, words
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.tree import Tree, TreeSpec

MAX_GRAPHS = 64
UNCAPTURABLE = "the models' steps may not be captured, by their own word"
_ALIGNMENT = 16


class Block:
    """Arrays in one piece of device memory with a pinned twin on the host, so that neighbours are copied together."""

    def __init__(self, device: Device, fields: Mapping[str, tuple[tuple[int, ...], DTypeLike]]) -> None:
        """`fields`: shape and dtype of each array, in the order in which they lie."""
        self._device, self._ends = device, dict[str, tuple[int, int]]()
        self.host, self.at = dict[str, NDArray[Any]](), dict[str, Tensor]()
        end = 0
        for name, (shape, dtype) in fields.items():
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + math.prod(shape) * np.dtype(dtype).itemsize
            self._ends[name] = begin, end
        self._memory, self._twin = device.empty((end,), np.uint8), device.pinned((end,), np.uint8)
        for name, (shape, dtype) in fields.items():
            begin, end = self._ends[name]
            self.host[name] = self._twin[begin:end].view(dtype).reshape(shape)
            self.at[name] = Tensor(self._memory.address + begin, shape, np.dtype(dtype))

    def upload(self, first: str, last: str, stream: int) -> None:
        """Enqueue the copy of the fields from `first` to `last` to the device."""
        self._device.upload(*self._span(first, last), stream)

    def download(self, first: str, last: str, stream: int) -> None:
        """Enqueue the copy of the fields from `first` to `last` to the host."""
        memory, twin = self._span(first, last)
        self._device.download(twin, memory, stream)

    def upload_row(self, name: str, slot: int, stream: int) -> None:
        """Enqueue the copy of one slot's part of a field to the device."""
        tensor, row = self.at[name], self.host[name][slot : slot + 1]
        to = Tensor(tensor.address + slot * row.nbytes, row.shape, row.dtype)
        self._device.upload(to, row, stream)

    def _span(self, first: str, last: str) -> tuple[Tensor, NDArray[Any]]:
        begin, end = self._ends[first][0], self._ends[last][1]
        return Tensor(self._memory.address + begin, (end - begin,), np.dtype(np.uint8)), self._twin[begin:end]


def round_block(target: StandardExecutor, nodes: int) -> Block:
    """Return a round's block: the host's inputs up to `counts`, the results from `counts` on."""
    one, each = (target.batch_size,), (target.batch_size, nodes)
    shapes = {"tokens": each, "parents": each, "node_rows": each, "counts": one, "fault": one, "length": one}
    shapes |= {"emitted": each, "path": each}
    return Block(target.device, {name: (shape, np.int32) for name, shape in shapes.items()})


def layer_addresses(executor: StandardExecutor) -> Tensor:
    """Return the addresses of each layer's keys and values, `uint64[2·layers]`, on the device."""
    device, cache = executor.device, executor.model.cache
    addresses = device.pinned((cache.shape[0],), np.uint64)
    addresses[:] = [part.address for part in slot_parts(cache)]
    layers = device.empty(addresses.shape, np.uint64)
    device.upload(layers, addresses, executor.stream)
    device.wait(executor.stream)
    return layers


def launch(kernels: Kernels, name: str, stream: int, **fields: Any) -> None:
    """Enqueue a kernel; tensors stand for the pointers of its struct, and fields that are not named are null or 0."""
    values = {key: value.address if isinstance(value, Tensor) else value for key, value in fields.items()}
    kernels.launch(name, LAUNCHERS[name](**values), stream)


def enqueue_tree_inputs(
    kernels: Kernels, executor: StandardExecutor, cache_len: Tensor, nodes: int, **fields: Any
) -> None:
    """Enqueue the inputs that tell a step its trees: masks, positions and rows, or TreeAttention's own inputs.

    Args:
        kernels: Kernels of the device.
        executor: Executor that runs the step.
        cache_len: Position of each slot's root, `int32[B]`.
        nodes: Nodes of the step.
        **fields: Other fields of `specbuild_mask`: parents, tree_nodes and counts, and tree_offset if it may not be 0.
    """
    model, tree, device, stream = executor.model, executor.model.tree, executor.device, executor.stream
    fields |= {"cache_len": cache_len, "batch": executor.batch_size, "nodes": nodes}
    fields |= {"capacity": executor.spec.capacity, "dtype": Dtype.BOOL}
    for window, mask in model.masks.items():
        out = {"output": mask, "window": window, "positions": model.positions, "rows": model.rows}
        launch(kernels, "tree_mask", stream, **fields, **out)
    if tree:
        launch(kernels, "tree_mask", stream, **fields, rows=tree.cache_len)
        shape = executor.batch_size, fields["tree_nodes"]
        device.copy_rows(tree.parents, Tensor(fields["parents"].address, shape, tree.parents.dtype), stream)
        device.copy(tree.counts, fields["counts"], stream)
        if "tree_offset" in fields:  # else it is 0, as the executor left it
            device.copy(tree.tree_offset, fields["tree_offset"], stream)


class Graphs:
    """Graphs by key, if the model's steps can be captured: the first use of a key only enqueues, the second captures.

    The first use may load a kernel or allocate, which no capture allows.
    """

    def __init__(self, executor: StandardExecutor) -> None:
        """`executor`: what runs the steps in the graphs, on its stream."""
        self._executor, self._device = executor, executor.device
        self._made = dict[Hashable, Step | None]()  # None: used once, not captured yet
        self._capturable = executor.model.capturable
        if not self._capturable and UNCAPTURABLE not in self._device.uncaptured:
            self._device.uncaptured.append(UNCAPTURABLE)

    def run(self, key: Hashable, enqueue: Step) -> None:
        """Enqueue the key's graph, timed; `enqueue` itself at first use, without captures, or under a profiler."""
        if self._capturable and not nvtx.enabled:
            if key in self._made:
                enqueue = self._made[key] = self._made[key] or self._device.graph(enqueue, self._executor.stream)
            else:
                if len(self._made) >= MAX_GRAPHS:
                    self._made.clear()
                self._made[key] = None
        self._executor.timed(enqueue)

    def clear(self) -> None:
        """Drop all graphs."""
        self._made.clear()


@dataclass(frozen=True, slots=True)
class ProcessorFlags:
    """Which processors any sequence of a round asks for, and a graph therefore has."""

    cut_offs: bool
    history: bool
    bias: bool
    masks: bool = False

    @classmethod
    def of(cls, params: Seq[SamplingParams]) -> ProcessorFlags:
        """Return what these requests together ask for."""
        return cls(
            any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params),
            any(p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty for p in params),
            any(p.logit_bias for p in params),
            any(p.constraint for p in params),
        )


class Slots:
    """Every slot's text and request on the device; the host's twin is written from the sequences themselves.

    `cache_len`: position of the root. In a slot that decodes nothing, rows from there on may be overwritten.
    """

    def __init__(self, device: Device, batch_size: int, vocab_size: int) -> None:
        self._device, self._vocab = device, vocab_size
        fields: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
            "cache_len": ((batch_size,), np.int32),
            "roots": ((batch_size,), np.int32),
            "pair": ((batch_size, 2), np.int32),
            "requests": ((batch_size, ctypes.sizeof(Request)), np.uint8),
            "growths": ((batch_size, ctypes.sizeof(Shape)), np.uint8),
        }
        self._block = Block(device, fields)
        self.at = self._block.at
        self._optional: dict[str, Block] = {}
        self._decoding: list[tuple[Sequence | None, TreeSpec | None]] = [(None, None)] * batch_size
        self._changed = True
        self._block.host["cache_len"][:] = 1

    def hold(self, slot: int, rows: int) -> None:
        """Mark a slot as decoding nothing; its rows from `rows` on may be overwritten."""
        self._decoding[slot], self._changed = (None, None), True
        self._block.host["cache_len"][slot] = max(rows, 1)  # a draft step of two nodes begins a row earlier
        self._block.host["growths"][slot] = 0

    def update(self, decoding: Seq[tuple[Sequence, TreeSpec | None]], stream: int) -> None:
        """Enqueue the upload of what changed: which sequences decode, and the tree grown for each (None: none)."""
        host = self._block.host
        for sequence, spec in decoding:
            known, grown = self._decoding[sequence.slot]
            if known is not sequence:
                self._enter(sequence, stream)
            if known is not sequence or grown != spec:
                shape = Shape(spec.branch, spec.width, spec.expand, spec.depth, spec.nodes) if spec else Shape()
                host["growths"][sequence.slot] = np.frombuffer(bytes(shape), dtype=np.uint8)
                self._decoding[sequence.slot], self._changed = (sequence, spec), True
        if self._changed:
            for sequence, _ in decoding:
                host["cache_len"][sequence.slot], host["roots"][sequence.slot] = sequence.cached, sequence.tokens[-1]
                host["pair"][sequence.slot] = sequence.tokens[-2:]
            self._block.upload("cache_len", "growths", stream)
            self._changed = False

    def choosing(self, asked: ProcessorFlags) -> dict[str, Any]:
        """Return the fields of `specbuild_choose` that describe the slots."""
        return {
            "requests": self.at["requests"],
            "root_position": self.at["cache_len"],
            "history": self.history(asked),
            "bias_tokens": self._optional["bias"].at["tokens"] if asked.bias else None,
            "bias_values": self._optional["bias"].at["values"] if asked.bias else None,
            "cut_offs": int(asked.cut_offs),
            "vocab": self._vocab,
        }

    def masks(self, asked: ProcessorFlags, nodes: int) -> Tensor | None:
        """Return the tokens that are legal after each node of a round, `uint32[B, nodes, words]`; None: all are."""
        return self._masks(nodes).at["masks"] if asked.masks else None

    def constrain(self, trees: Seq[tuple[Sequence, Tree]], nodes: int, stream: int) -> None:
        """Enqueue the upload of a round's masks of legal tokens; for an unconstrained sequence every token is legal.

        A sequence whose constraint raises fails alone.
        """
        block = self._masks(nodes)
        block.host["masks"][:] = np.uint32(0xFFFFFFFF)
        for sequence, tree in trees:
            if (matcher := sequence.sampler.matcher) is not None:
                with alone(sequence):
                    tree_masks(matcher, tree, self._vocab, block.host["masks"][sequence.slot])
        block.upload("masks", "masks", stream)

    def _masks(self, nodes: int) -> Block:
        """Return the masks of rounds of `nodes` nodes, made when the first constrained sequence needs them."""
        name = f"masks of {nodes}"
        if name not in self._optional:
            shape = len(self._decoding), nodes, words(self._vocab)
            self._optional[name] = Block(self._device, {"masks": (shape, np.uint32)})
        return self._optional[name]

    def history(self, asked: ProcessorFlags) -> Tensor | None:
        """Return the history `uint32[B, V]`; None if no sequence has penalties."""
        return self._optional["history"].at["counts"] if asked.history else None

    def _enter(self, sequence: Sequence, stream: int) -> None:
        """Write a sequence's request and, if it asks for them, upload its history and its bias, at V times its slot."""
        slot, p = sequence.slot, sequence.params
        begin, asked = slot * self._vocab, ProcessorFlags.of([p])
        floor = math.log(p.min_p) if p.min_p > 0 else -math.inf
        penalties = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        ends = begin, begin + len(p.logit_bias)
        request = Request(sequence.sampler.seed, p.top_p, floor, p.temperature, *penalties, p.top_k, *ends)
        self._block.host["requests"][slot] = np.frombuffer(bytes(request), dtype=np.uint8)
        if asked.history:
            block = self._block_of("history", counts=np.uint32)
            counts = np.bincount(np.array(sequence.output, dtype=np.int64), minlength=self._vocab)
            block.host["counts"][slot] = counts
            block.host["counts"][slot, sequence.tokens] |= np.uint32(1 << 31)
            block.upload_row("counts", slot, stream)
        if asked.bias:
            block = self._block_of("bias", tokens=np.int32, values=np.float32)
            tokens = sorted(p.logit_bias)
            block.host["tokens"][slot, : len(tokens)] = tokens
            block.host["values"][slot, : len(tokens)] = [p.logit_bias[token] for token in tokens]
            block.upload_row("tokens", slot, stream)
            block.upload_row("values", slot, stream)

    def _block_of(self, name: str, **dtypes: DTypeLike) -> Block:
        """Return a block with values of every token for every slot, made when the first sequence asks for it."""
        if name not in self._optional:
            shape = len(self._decoding), self._vocab
            self._optional[name] = Block(self._device, {field: (shape, dtype) for field, dtype in dtypes.items()})
        return self._optional[name]
