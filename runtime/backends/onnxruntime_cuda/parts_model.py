"""A model of ONNX Runtime with specbuild's own kernels: graphs that run in turn, kernels between them.

A file of parts says which graph runs with which weights, and what each kernel reads. Weights are uploaded once, as they
lie in the bundle, and bound to the graphs as inputs; layers of one form share a session. On a GPU a step's graph holds
all parts and kernels.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.device import MAX_NODES, Device, Step, Tensor
from specbuild.runtime.backends.gpu.step_tensors import slot_parts
from specbuild.runtime.backends.kernels.abi import Attention, Dtype, Product
from specbuild.runtime.backends.kernels.interface import Kernels
from specbuild.runtime.backends.onnx_graph import GraphFile
from specbuild.runtime.errors import BundleError

from .model import OrtModel, RunContext, open_on
from .parts_file import TYPES, AttentionRecord, PartRecord, PartsFile, ProductRecord, Weight

_STAGED = 4 << 20  # bytes of weights in an upload
_ALIGNED = 256  # bytes
_KERNELS = {"float16": Dtype.F16, "bfloat16": Dtype.BF16}


class Parts(NamedTuple):
    """A model's file of parts, the kernels, and how many multiprocessors there are."""

    graph: GraphFile
    kernels: Kernels
    processors: int


class PartsModel(OrtModel):
    """See `Model` and `OrtModel`."""

    _tree_nodes = MAX_NODES

    def __init__(self, parts: Parts, spec: ModelSpec, context: RunContext) -> None:
        """See `OrtModel`, whose graph the parts take the place of."""
        graph, self._kernels, self._processors = parts
        self._file = PartsFile.read(graph)
        if len(self._file.attentions) != spec.layers:
            raise BundleError(
                f"{graph.path} has {len(self._file.attentions)} layers, not {spec.layers}: build it again"
            )
        self._weights = _upload(self._file.weights, graph, context.device, context.stream)
        super().__init__(graph, spec, context)

    def _open(self) -> np.dtype[Any]:
        """Open the graphs on the stream; return the dtype of the caches' memory, which is the queries'."""
        graph, names = self._graph, {step.graph for step in self._file.steps if isinstance(step, PartRecord)}
        assert isinstance(graph, GraphFile)
        self._dtype = self._file.values[self._file.attentions[0].output].dtype
        if self._dtype not in _KERNELS and self._provider == "cuda":
            raise BundleError(f"{graph.path} computes in {self._dtype}: TreeAttention has float16 and bfloat16")
        parts = {n: GraphFile(graph.path.with_name(PurePath(n).name), graph.beside(n)[:], graph.beside) for n in names}
        self._session = {name: open_on(part, self._provider, self.stream) for name, part in parts.items()}
        return TYPES[self._dtype]

    def _allocate(self) -> None:
        """Allocate the values between parts, and attention's workspace."""
        rows = max(self.batch_size * self.buckets[-1], self.chunk)
        self._values, free = dict[str, Tensor](), dict[int, list[Tensor]]()
        for first, last in _lives(self._file):
            for name in first:
                value = self._file.values[name]
                size = rows * math.prod(each for each in value.shape if isinstance(each, int))
                dtype = TYPES[value.dtype]
                spare = free.get(size * dtype.itemsize)
                self._values[name] = spare.pop() if spare else self._device.empty((size,), dtype)
            for name in last:
                free.setdefault(self._values[name].nbytes, []).append(self._values[name])
        shapes = [(self.batch_size, nodes) for nodes in self.buckets] + [(1, n) for n in range(1, self.chunk + 1)]
        each = [
            self._params(self._file.attentions[0], *shape, self.tensors.cache, self.tensors.cache) for shape in shapes
        ]
        self._workspace = self._device.empty((max(map(self._kernels.workspace, each), default=0) or 1,), np.uint8)

    def _params(self, record: AttentionRecord, batch: int, nodes: int, keys: Tensor, values: Tensor) -> Attention:
        """Return an attention's parameters for a step of `batch` slots, from those on whose caches these are."""
        spec = self.spec
        heads, size = {"query": record.heads, "key": spec.kv_heads, "value": spec.kv_heads}, spec.head_dim
        width = size * TYPES[self._dtype].itemsize
        packed, before = record.inputs.get("qkv"), itertools.accumulate([0, *heads.values()])
        fields = dict[str, int]()
        for (name, count), first in zip(heads.items(), before, strict=False):
            source = self._values[packed or record.inputs[name]].address
            fields[name] = source + (first * width if packed else 0)
            fields[f"{name}_stride"] = (sum(heads.values()) if packed else count) * size
        tree, short = self.tensors.tree, nodes <= self.buckets[-1]
        assert tree is not None
        if record.cos and record.sin:
            positions, half = self._weights[record.cos].shape
            fields |= {"cos": self._weights[record.cos].address, "sin": self._weights[record.sin].address}
            fields |= {"positions": positions, "rotary_dim": 2 * half}
        dtype = _KERNELS.get(self._dtype, Dtype.F32)
        params = Attention(
            **fields,
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

    def _bind(self, batch: int, nodes: int, slot: int, logit_nodes: Tensor) -> Sequence[Step]:
        """See `OrtModel`: a session for each part, and between two of them an attention."""
        inputs, outputs = self.tensors.ends(self.spec, batch, nodes, logit_nodes)
        bound = self._weights | inputs | outputs
        sizes = {"batch": batch, "nodes": nodes, "logit_nodes": logit_nodes.shape[0]}
        for name, value in self._file.values.items():
            shape = (each if isinstance(each, int) else sizes[each] for each in value.shape)
            bound[name] = self._values[name].view(*shape)
        steps, caches = list[Step](), iter(slot_parts(self.tensors.cache, slot))
        for step in self._file.steps:
            if isinstance(step, PartRecord):
                inputs = {f"i{number}": bound[name] for number, name in enumerate(step.inputs)}
                outputs = {f"o{number}": bound[name] for number, name in enumerate(step.outputs)}
                steps.append(self._bound(self._session[step.graph], inputs, outputs))
            elif isinstance(step, AttentionRecord):
                each = self._params(step, batch, nodes, next(caches), next(caches))
                each.workspace = self._workspace.address if each.splits > 1 else None
                steps.append(functools.partial(self._kernels.launch, "tree_attention", each, self.stream))
            else:
                product = self._product(step, bound)
                steps.append(functools.partial(self._kernels.launch, "block_product", product, self.stream))
        return steps

    def _product(self, record: ProductRecord, bound: Mapping[str, Tensor]) -> Product:
        """Return a product's parameters for the values of a step."""
        rows = math.prod(bound[record.output].shape) // record.columns
        return Product(
            input=bound[record.input].address,
            codes=self._weights[record.codes].address,
            factors=self._weights[record.factors].address,
            output=bound[record.output].address,
            rows=rows,
            inner=record.inner,
            columns=record.columns,
            bits=record.bits,
            block=record.block,
            scale_bits=record.scale_bits,
            minimum_bits=record.minimum_bits,
            dtype=_KERNELS[self._dtype],
        )


def _lives(file: PartsFile) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the values that each step is the first to need, and the last."""
    first, last = dict[str, int](), dict[str, int]()
    for at, step in enumerate(file.steps):
        for name in step.named:
            if name in file.values:
                first.setdefault(name, at)
                last[name] = at
    for at in range(len(file.steps)):
        yield [name for name in first if first[name] == at], [name for name in last if last[name] == at]


def _upload(weights: Mapping[str, Weight], graph: GraphFile, device: Device, stream: int) -> dict[str, Tensor]:
    """Copy weights to the device, piece by piece; raise BundleError if a file does not hold one."""
    files = {name: np.frombuffer(graph.beside(name), np.uint8) for name in {each.file for each in weights.values()}}
    staged, tensors = device.pinned((_STAGED,), np.uint8), dict[str, Tensor]()
    sizes = {n: math.prod(each.shape) * TYPES[each.dtype].itemsize for n, each in weights.items()}
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
        tensors[name] = Tensor(address, tuple(each.shape), TYPES[each.dtype])
        address += -(-sizes[name] // _ALIGNED) * _ALIGNED
    return tensors
