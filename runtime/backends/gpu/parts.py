"""A model of ONNX Runtime with specbuild's own attention: graphs that run in turn, TreeAttention's kernel between them.

A file of parts says which graph runs with which weights, and what each attention reads. Weights are uploaded once, as
they lie in the bundle, and bound to the graphs as inputs; layers of one form share a session. On a GPU a step's graph
holds all parts and kernels.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.kernels.abi import Attention, Dtype
from specbuild.runtime.backends.kernels.interface import Kernels
from specbuild.runtime.backends.onnx_graph import GraphFile
from specbuild.runtime.checked_json import Text, checked, decode
from specbuild.runtime.errors import BundleError

from .device import MAX_NODES, Device, Step, Tensor, TreeInputs, slot_parts
from .onnxruntime_cuda import Bound, OrtModel, Provider, open_on

PARTS = "parts.json"
_STAGED = 4 << 20  # bytes of weights in an upload
_ALIGNED = 256  # bytes
# By ONNX's name of a type: its dtype in memory, and how ONNX Runtime is told of it.
_TYPES: dict[str, tuple[np.dtype[Any], Any]] = {
    **{name: (np.dtype(name), np.dtype(name).type) for name in ("float16", "float32", "int32", "int64")},
    "bfloat16": (np.dtype(np.uint16), 16),
}
_KERNELS = {"float16": Dtype.F16, "bfloat16": Dtype.BF16}
Size = Annotated[int, Meta(ge=0, le=1 << 40)]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor between parts: ONNX's name of its type, and its shape, in which "batch" and "nodes" may occur."""

    dtype: Text
    shape: list[Size | Text]


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight: its type, its shape, the file beside this one that holds it, and from which byte on."""

    dtype: Text
    shape: list[Size]
    file: Text
    offset: Size


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A part: its graph's file, and its inputs and outputs in the graph's order, by name."""

    graph: Text
    inputs: list[Text]
    outputs: list[Text]


@dataclass(frozen=True, slots=True)
class AttentionRecord:
    """An attention: the values that it reads, "query", "key" and "value" or all three side by side as "qkv", and makes.

    `cos` and `sin` are weights `float32 [positions, rotary_dim / 2]`, None where nothing is rotated.
    """

    inputs: dict[Text, Text]
    output: Text
    heads: Size
    scale: float
    softcap: float
    window: Size
    cos: Text | None
    sin: Text | None


@dataclass(frozen=True, slots=True)
class PartsFile:
    """A model in parts, with one attention between each and the next."""

    parts: list[PartRecord]
    attentions: list[AttentionRecord]
    weights: dict[Text, Weight]
    values: dict[Text, Value]

    @classmethod
    def read(cls, graph: GraphFile) -> PartsFile:
        """Read a file of parts; raise BundleError if no build can have written it."""
        try:
            found = checked(decode(graph.data), cls)
            ends = {"input_ids", "logit_nodes", "hidden_in", "logits", "hidden"}
            named = [name for part in found.parts for name in (*part.inputs, *part.outputs)]
            unknown = set(named) - found.weights.keys() - found.values.keys() - ends
            if len(found.parts) != len(found.attentions) + 1 or unknown:
                raise ValueError("parts and attentions do not fit each other")
            for each in found.attentions:
                read, tables = {*each.inputs.values(), each.output}, {each.cos, each.sin} - {None}
                known = set(each.inputs) in ({"qkv"}, {"query", "key", "value"})
                if not known or read - found.values.keys() or tables - found.weights.keys():
                    raise ValueError("an attention reads what is not there")
            types = {each.dtype for each in found.weights.values()} | {each.dtype for each in found.values.values()}
            if types - _TYPES.keys():
                raise ValueError("a type that no build writes")
        except ValueError as error:
            raise BundleError(f"{graph.path} is malformed ({str(error)[:300]}): build the bundle again") from None
        return found


class Parts(NamedTuple):
    """A model's file of parts, the kernels, and how many multiprocessors there are."""

    graph: GraphFile
    kernels: Kernels
    processors: int


class PartsModel(OrtModel):
    """See `Model` and `OrtModel`."""

    def __init__(
        self,
        parts: Parts,
        spec: ModelSpec,
        device: Device,
        batch_size: int,
        buckets: Sequence[int],
        chunk: int,
        provider: Provider,
        stream: int,
    ) -> None:
        """See `OrtModel`, whose graph the parts take the place of."""
        graph, self._kernels, self._processors = parts
        self._file = PartsFile.read(graph)
        if len(self._file.attentions) != spec.layers:
            raise BundleError(
                f"{graph.path} has {len(self._file.attentions)} layers, not {spec.layers}: build it again"
            )
        self._weights = _upload(self._file.weights, graph, device, stream)
        self._bound_weights = {
            name: Bound(name, _TYPES[each.dtype][1], tuple(each.shape), self._weights[name].address)
            for name, each in self._file.weights.items()
        }
        super().__init__(graph, spec, device, batch_size, buckets, chunk, provider, stream)

    def _open(self) -> np.dtype[Any]:
        """Open the graphs on the stream; return the dtype of the caches' memory, which is the queries'."""
        graph, names = self._graph, {part.graph for part in self._file.parts}
        assert isinstance(graph, GraphFile)
        parts = {n: GraphFile(graph.path.with_name(PurePath(n).name), graph.beside(n)[:], graph.beside) for n in names}
        self._session = {name: open_on(part, self._provider, self.stream) for name, part in parts.items()}
        self._dtype = self._file.values[self._file.attentions[0].output].dtype
        if self._dtype not in _KERNELS and self._provider == "cuda":
            raise BundleError(f"{graph.path} computes in {self._dtype}: TreeAttention has float16 and bfloat16")
        return _TYPES[self._dtype][0]

    def _allocate(self) -> None:
        """Allocate the tree's arrays, the values between parts, and attention's workspace."""
        vectors = (self._device.empty((self.batch_size,), np.int32) for _ in range(3))
        self.tree = TreeInputs(self._device.empty((self.batch_size, MAX_NODES), np.int32), *vectors)
        rows = max(self.batch_size * self.buckets[-1], self.chunk)
        self._values, free = dict[str, Tensor](), dict[int, list[Tensor]]()
        for made, ended in _lives(self._file):
            for name in made:
                value = self._file.values[name]
                size = rows * math.prod(each for each in value.shape if isinstance(each, int))
                dtype = _TYPES[value.dtype][0]
                spare = free.get(size * dtype.itemsize)
                self._values[name] = spare.pop() if spare else self._device.empty((size,), dtype)
            for name in ended:
                free.setdefault(self._values[name].nbytes, []).append(self._values[name])
        shapes = [(self.batch_size, nodes) for nodes in self.buckets] + [(1, n) for n in range(1, self.chunk + 1)]
        each = [self._params(self._file.attentions[0], *shape, self.cache, self.cache) for shape in shapes]
        self._workspace = self._device.empty((max(map(self._kernels.workspace, each), default=0) or 1,), np.uint8)

    def _params(self, record: AttentionRecord, batch: int, nodes: int, keys: Tensor, values: Tensor) -> Attention:
        """Return an attention's parameters for a step of `batch` slots, from those on whose caches these are."""
        spec = self.spec
        heads, size = {"query": record.heads, "key": spec.kv_heads, "value": spec.kv_heads}, spec.head_dim
        width = size * _TYPES[self._dtype][0].itemsize
        packed, before = record.inputs.get("qkv"), itertools.accumulate([0, *heads.values()])
        given = dict[str, int]()
        for (name, count), first in zip(heads.items(), before, strict=False):
            source = self._values[packed or record.inputs[name]].address
            given[name] = source + (first * width if packed else 0)
            given[f"{name}_stride"] = (sum(heads.values()) if packed else count) * size
        tree, short = self.tree, nodes <= self.buckets[-1]
        assert tree is not None
        if record.cos and record.sin:
            positions, half = self._weights[record.cos].shape
            given |= {"cos": self._weights[record.cos].address, "sin": self._weights[record.sin].address}
            given |= {"positions": positions, "rotary_dim": 2 * half}
        dtype = _KERNELS.get(self._dtype, Dtype.F32)
        params = Attention(
            **given,
            key_cache=keys.address,
            value_cache=values.address,
            parents=tree.parents.address if short else None,
            tree_nodes=tree.parents.shape[1] if short else 0,
            cache_len=tree.cache_len.address,
            tree_offset=tree.tree_offset.address,
            counts=tree.counts.address,
            output=self._values[record.output].address,
            scale=record.scale,
            softcap=record.softcap,
            window=record.window,
            batch=batch,
            nodes=nodes,
            heads=record.heads,
            kv_heads=spec.kv_heads,
            head_dim=size,
            capacity=spec.capacity,
            dtype=dtype,
            cache_dtype=dtype,
        )
        params.splits = self._kernels.splits(params, self._processors)
        return params

    def _bind(self, batch: int, nodes: int, slot: int, first: Tensor, wanted: int) -> Sequence[Step]:
        """See `OrtModel`: a session for each part, and between two of them an attention."""
        ends = self._ends(batch, nodes, first, wanted)
        found = self._bound_weights | {each.name: each for each in itertools.chain(*ends)}
        sizes = {"batch": batch, "nodes": nodes, "logit_nodes": wanted}
        for name, value in self._file.values.items():
            shape = tuple(each if isinstance(each, int) else sizes[each] for each in value.shape)
            found[name] = Bound(name, _TYPES[value.dtype][1], shape, self._values[name].address)
        steps, caches = list[Step](), slot_parts(self.cache, slot)
        for layer, part in enumerate(self._file.parts):
            inputs = [found[name]._replace(name=f"i{number}") for number, name in enumerate(part.inputs)]
            outputs = [found[name]._replace(name=f"o{number}") for number, name in enumerate(part.outputs)]
            steps.append(self._bound(self._session[part.graph], inputs, outputs))
            if layer < len(self._file.attentions):
                each = self._params(self._file.attentions[layer], batch, nodes, *caches[2 * layer : 2 * layer + 2])
                each.workspace = self._workspace.address if each.splits > 1 else None
                steps.append(functools.partial(self._kernels.launch, "tree_attention", each, self.stream))
        return steps


def _lives(file: PartsFile) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the values that each part, with the attention after it, is the first to need, and the last."""
    used = [[*part.inputs, *part.outputs] for part in file.parts]
    for names, attention in zip(used, file.attentions, strict=False):
        names += [*attention.inputs.values(), attention.output]
    first, last = dict[str, int](), dict[str, int]()
    for at, names in enumerate(used):
        for name in names:
            if name in file.values:
                first.setdefault(name, at)
                last[name] = at
    for at in range(len(used)):
        yield [name for name in first if first[name] == at], [name for name in last if last[name] == at]


def _upload(weights: Mapping[str, Weight], graph: GraphFile, device: Device, stream: int) -> dict[str, Tensor]:
    """Copy weights to the device, piece by piece; raise BundleError if a file does not hold one."""
    files = {name: np.frombuffer(graph.beside(name), np.uint8) for name in {each.file for each in weights.values()}}
    staged, found = device.pinned((_STAGED,), np.uint8), dict[str, Tensor]()
    sizes = {n: math.prod(each.shape) * _TYPES[each.dtype][0].itemsize for n, each in weights.items()}
    memory = device.empty((sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes.values()) or 1,), np.uint8)
    address = memory.address
    for name, each in weights.items():
        data: NDArray[np.uint8] = files[each.file][each.offset : each.offset + sizes[name]]
        if len(data) != sizes[name]:
            raise BundleError(f"{name!r} is not within {each.file!r}: build the bundle again")
        for start in range(0, len(data), _STAGED):
            piece = data[start : start + _STAGED]
            staged[: len(piece)] = piece
            device.upload(Tensor(address + start, piece.shape, piece.dtype), staged[: len(piece)], stream)
            device.wait(stream)
        found[name] = Tensor(address, tuple(each.shape), _TYPES[each.dtype][0])
        address += -(-sizes[name] // _ALIGNED) * _ALIGNED
    return found
