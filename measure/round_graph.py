"""Describes, without a device, the graph of rounds that follow each other: its nodes and their order.

The loop's own code enqueues a round on a device that only records, with models known only from the manifest.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.backends.executor import ModelSpec, spec_of
from specbuild.runtime.backends.gpu.device import Place, Step, Tensor
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.gpu.step_tensors import StepTensors, TreeInputs
from specbuild.runtime.backends.kernels.grids import launches, splits, workspace
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import Manifest
from specbuild.runtime.bundle.memory_plan import block_size, cache_item_bytes, pages
from specbuild.runtime.decoding.device.memory import Block
from specbuild.runtime.decoding.device.resident_run import ResidentRun
from specbuild.runtime.decoding.device.room import Room
from specbuild.runtime.decoding.device.rounds import Rounds
from specbuild.runtime.decoding.device.slots import ProcessorFlags
from specbuild.runtime.decoding.device.tree_grower import Extent
from specbuild.runtime.errors import ExecutionError, OptionError
from specbuild.runtime.speculation.tree import TreeSpec

HELD = frozenset({"kernel", "memcpy", "memset", "child", "conditional"})  # kinds of node that a body may hold
GREEDY = ProcessorFlags(cut_offs=False, history=False, bias=False)
_WRITES = {
    "choose_tokens": "choices scores workspace tickets fault",
    "walk_tree": "history path length emitted roots pair fault",
    "commit_path": "layers cache_len kept ticket fault",
    "tree_mask": "output positions rows fault",
    "grow_level": "growths pool_tokens pool_parents pool_rows pool_scores frontier level_counts level_tokens positions "
    "level_parents level_offset fault",
    "finish_tree": "tree_tokens tree_parents tree_counts tree_nodes node_rows fault",
    "publish": "ring published round",
}  # by launcher, the fields through which its kernels write


class RecordingDevice:
    """A `Device` without memory that records kind, stream, order and tensors of what a loop's body enqueues."""

    def __init__(self) -> None:
        self.uncaptured, self.capturing = list[str](), False  # no model asks
        self.identity: dict[str, Any] = {}
        self.nodes: list[dict[str, Any]] = []
        self.edges: list[tuple[int, int]] = []
        self.names: list[tuple[int, int, str]] = []  # begin, end and name of each named tensor
        self._addresses, self._streams = itertools.count(1 << 40, 1 << 36), itertools.count(1)
        self._last: dict[int, set[int]] | None = None  # by stream, nodes that its next one waits for; None: no capture

    def add(self, kind: str, stream: int, reads: Seq[int] = (), writes: Seq[int] = (), **more: Any) -> None:
        """Record a node; `reads` and `writes` are addresses."""
        if self._last is None:
            return
        node = {"id": len(self.nodes), "kind": kind, "stream": stream, **more}
        node |= {"reads": self._named(reads), "writes": self._named(writes)}
        self.edges += [(before, node["id"]) for before in sorted(self._last.get(stream, ()))]
        self._last[stream] = {node["id"]}
        self.nodes.append(node)

    def _named(self, addresses: Seq[int]) -> list[str]:
        """Return the smallest named tensors around the addresses; an address in none of them is left out."""
        inside = [[(e - b, name) for b, e, name in self.names if b <= address < e] for address in addresses]
        return list(dict.fromkeys(min(found)[1] for found in inside if found))

    def empty(self, shape: Seq[int], dtype: DTypeLike) -> Tensor:
        """See `Device`; each tensor gets 64 GiB of addresses and no memory."""
        self.add("allocation", 0)
        return Tensor(next(self._addresses), tuple(shape), np.dtype(dtype))

    def pinned(self, shape: Seq[int], dtype: DTypeLike) -> NDArray[Any]:
        """See `Device`; the system allocates this memory when it is written."""
        return np.zeros(shape, dtype)

    def stream(self) -> int:
        """See `Device`."""
        return next(self._streams)

    def upload(self, to: Tensor, source: NDArray[Any], stream: int) -> None:
        """See `Device`; such a node may not be in a loop's body."""
        self.add("copy from the host", stream, writes=[to.address], bytes=source.nbytes)

    def download(self, to: NDArray[Any], source: Tensor, stream: int) -> None:
        """See `Device`; such a node may not be in a loop's body: the host reads the ring instead."""
        self.add("copy to the host", stream, [source.address], bytes=to.nbytes)

    def fill(self, to: Tensor, byte: int, stream: int) -> None:
        """See `Device`."""
        self.add("memset", stream, writes=[to.address], bytes=to.nbytes)

    def copy(self, to: Tensor, source: Tensor, stream: int) -> None:
        """See `Device`."""
        self.add("memcpy", stream, [source.address], [to.address], bytes=source.nbytes)

    copy_rows = copy

    def move_rows(self, cache: Tensor, source: Place, to: Place, count: int, stream: int) -> None:
        """See `Device`."""
        self.add("memcpy", stream, [cache.address], [cache.address])

    def after(self, stream: int, other: int) -> None:
        """See `Device`; becomes an edge."""
        if self._last is not None:
            self._last[stream] = self._last.get(stream, set()) | self._last.get(other, set())

    def wait(self, stream: int) -> None:
        """See `Device`; such a node may not be in any graph."""
        self.add("wait of the host", stream)

    def mark(self, stream: int, mark: Any = None) -> None:
        """See `Device`; such a node may not be in any graph."""
        self.add("event", stream)

    def reached(self, counter: NDArray[np.uint64], value: int, stream: int) -> bool:
        """See `Device`."""
        return False

    def graph(self, enqueue: Step, stream: int) -> Step:
        """See `Device`."""
        return enqueue

    def loop(self, body: Callable[[int], None], stream: int) -> Step:
        """Record the body; raises ExecutionError for a node that no conditional body can hold."""
        self.nodes, self.edges, self._last = [], [], {}
        try:
            body(1)
        finally:
            self._last = None
        for at, kind in ((node["id"], node["kind"]) for node in self.nodes if node["kind"] not in HELD):
            raise ExecutionError(f"node {at} of the loop, {kind}, is none that a conditional body can hold: report it")
        return lambda: None

    def close(self) -> None:
        """See `Device`."""


class _Kernels:
    """Kernels that are recorded instead of launched."""

    def __init__(self, recorder: RecordingDevice) -> None:
        self._device = recorder

    def launch(self, name: str, params: ctypes.Structure, stream: int = 0) -> None:
        """See `Kernels`; raises OptionError for what the kernels refuse."""
        pointers, writes = list(_pointers(params)), _WRITES[name].split()
        for kernel, x, y, z, threads, shared in launches(name, params):
            self._device.add(
                "kernel",
                stream,
                [address for field, address in pointers if field not in writes],
                [address for field, address in pointers if field in writes],
                kernel=kernel,
                grid=[x, y, z],
                threads=threads,
                shared_bytes=shared,
            )

    workspace, splits = staticmethod(workspace), staticmethod(splits)


def _pointers(params: Any) -> Iterator[tuple[str, int]]:
    """Yield name and value of the non-null pointer fields of a struct and of its caches."""
    for name, kind in params._fields_:
        value = getattr(params, name)
        if name == "caches":
            yield from (pair for cache in value for pair in _pointers(cache))
        elif kind is c_void_p and value:
            yield name, value


@dataclass(frozen=True, slots=True)
class _Pages:
    """As much of `Pages` as a round needs."""

    tensor: Tensor
    rows: int
    count: int


class _Model:
    """A model known from the manifest, whose step is a child graph."""

    capturable = True

    def __init__(
        self,
        spec: ModelSpec,
        recorder: RecordingDevice,
        batch: int,
        buckets: Seq[int],
        plugin: bool,
        item: Any,
        pages: Any,
    ) -> None:
        """`plugin`: whether its attention is TreeAttention; `item`: the dtype of its cache."""
        self.spec, self.batch_size, self.buckets, self.lengths, self.pages = spec, batch, buckets, buckets[-1:], pages
        self.chunk = buckets[-1]
        self._device = recorder
        parts, rows = (1 + pages.count, pages.rows) if pages else (batch, spec.capacity)
        cache = recorder.empty((2 * spec.layers, parts, spec.kv_heads, rows, spec.head_dim), item)
        sizes = batch, self.chunk, self.chunk
        self.tensors = StepTensors.allocate(recorder, spec, sizes, cache, self.chunk if plugin else 0)

    def enqueue(self, nodes: int, stream: int) -> None:
        """See `Model`."""
        tensors, tree = self.tensors, self.tensors.tree
        rows = [tensors.positions, tensors.rows]
        rows = [tree.parents, tree.cache_len, tree.tree_offset, tree.counts] if tree else rows
        table = [self.pages.tensor] if self.pages else []
        reads = [tensors.tokens, *rows, *table, *tensors.masks.values(), tensors.cache]
        read, written = ([tensor.address for tensor in each] for each in (reads, (tensors.logits, tensors.cache)))
        self._device.add("child", stream, read, written, model=self.spec.name, nodes=nodes)

    def prefill(self, slot: int, nodes: int, last: int, stream: int) -> None:
        """See `Model`."""

    def close(self) -> None:
        """See `Model`."""


def describe_bundle(bundle: Bundle, batch_size: int, tree: str, asked: ProcessorFlags = GREEDY) -> dict[str, Any]:
    """Describe, as JSON data, the graph in which a bundle's rounds would follow each other on a GPU.

    The body has nodes (kind, stream, tensors by name, kernels and their grids) and edges between their ids. This needs
    no GPU and only the manifest. Raises OptionError, BundleError, and ExecutionError for what no body can hold.

    Args:
        bundle: The bundle.
        batch_size: Slots of the engine.
        tree: The tree that every sequence drafts, or "off".
        asked: The requests' processors; history and bias cannot be among them.
    """
    manifest, recorder = bundle.manifest, RecordingDevice()
    if "draft" in manifest.models and (kind := manifest.models["draft"].kind) != "model":
        raise OptionError(f"the host grows the trees of a draft of kind {kind}, so no rounds follow each other")
    spec = None if tree == "off" or "draft" not in manifest.models else TreeSpec.parse(tree).check(manifest.buckets[-1])
    names = ["target", "draft"] if spec else ["target"]
    count, rows = pages(manifest, batch_size), block_size(manifest)
    capacity = manifest.models["target"].capacity
    table = _Pages(recorder.empty((batch_size, capacity // rows), np.int32), rows, count) if rows else None
    executors = {name: _executor(manifest, name, recorder, batch_size, table) for name in names}
    largest = manifest.buckets[-1]
    executors["target"].keep_to(ExactnessClass(batch_size * largest, largest))  # as in an engine without limits
    rounds = Rounds(executors["target"], executors.get("draft"), _Kernels(recorder), trunk=True)
    resident = ResidentRun(rounds, Room(executors["target"], executors.get("draft")))
    nodes = executors["target"].bucket(1 + spec.nodes if spec else 1)
    extent = Extent.of([spec], executors["draft"], nodes) if spec else None
    parts: dict[str, Any] = {name: executor.model.tensors for name, executor in executors.items()}
    parts |= {"pages": table} if table else {}
    parts |= {"slots": rounds.slots.at, "round": rounds.blocks[nodes]}
    parts["loop"] = {name: value for name, value in vars(rounds).items() if name != "blocks"}
    parts |= {"ring": vars(resident.ring)} | ({"drafting": vars(rounds.grower)} if rounds.grower else {})
    recorder.names += _tensors("", parts)
    resident.capture(nodes, extent, asked)
    return {
        "backend": manifest.backend,
        "batch_size": batch_size,
        "tree": spec.text if spec else "off",
        "nodes": nodes,
        "rounds": resident.ring.ahead,
        "kind": "conditional",
        "condition": "while",
        "counts": dict(sorted(Counter(node["kind"] for node in recorder.nodes).items())),
        "body": {"nodes": recorder.nodes, "edges": [list(edge) for edge in recorder.edges]},
    }


def _executor(
    manifest: Manifest, name: str, recorder: RecordingDevice, batch_size: int, table: _Pages | None
) -> StandardExecutor:
    record, spec = manifest.models[name], spec_of(manifest, name)
    plugin = "parents" in record.inputs
    item = f"u{cache_item_bytes(manifest, record)}"  # unsigned integers as wide as the elements of the cache
    model = _Model(spec, recorder, batch_size, tuple(manifest.buckets), plugin, item, table)
    return StandardExecutor(recorder, model, recorder.stream())


def _tensors(name: str, thing: Any) -> Iterator[tuple[int, int, str]]:
    """Yield begin, end and dotted name of every tensor and pinned array in `thing`."""
    if isinstance(thing, Tensor):
        yield thing.address, thing.address + thing.nbytes, name
    elif isinstance(thing, np.ndarray):
        yield thing.ctypes.data, thing.ctypes.data + thing.nbytes, f"{name} (host)"
    elif isinstance(thing, Block):
        yield from _tensors(name, thing.at)
    elif isinstance(thing, StepTensors | TreeInputs):
        yield from _tensors(name, {part: getattr(thing, part) for part in thing.__dataclass_fields__})
    elif isinstance(thing, _Pages):
        yield from _tensors(name, {"table": thing.tensor})
    elif isinstance(thing, Mapping | list):
        for part, inner in (thing if isinstance(thing, Mapping) else dict(enumerate(thing))).items():
            yield from _tensors(f"{name}.{str(part).strip('_')}".strip("."), inner)
