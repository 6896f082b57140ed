"""Times of the kernels around the attention, and of one verification step; part of kernels.py.

Their inputs stay in the L2 cache between launches, as in a round, so the share of the copy bandwidth compares a kernel
with a copy of as many bytes, not with the speed of GPU memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.attention import Case, Shape, tree
from benchmarks.gpu.device import Device
from specbuild.runtime.backends.kernels.abi import (
    Choose,
    Commit,
    Dtype,
    KernelLibrary,
    Request,
    Walk,
)


def others(device: Device, library: KernelLibrary, bandwidth: float, smoke: bool) -> dict[str, Any]:
    """Measure the kernels around the attention at an 8B-shaped model's sizes: batch 1, 16 nodes, vocabulary 128,256."""
    sizes = Sizes(4, 1000, 2, 2, 64, 64) if smoke else Sizes()
    bench = Bench(device, library, bandwidth, sizes)
    bench.choose()
    bench.walk()
    bench.commit()
    results = bench.results | {"verify": verify(device, library, sizes.nodes, sizes.capacity, smoke)}
    for choice in ("choose sampled", "choose top-k 50, top-p 0.9"):
        glue = sum(results[name]["us"] for name in (choice, "walk", "commit"))
        results[f"{choice} + walk + commit, of verify"] = glue / results["verify"]["us"]
    return results


@dataclass(frozen=True)
class Sizes:
    """The sizes of an 8B-shaped model and of a step."""

    nodes: int = 16
    vocab: int = 128256
    layers: int = 32
    kv_heads: int = 8
    size: int = 128
    capacity: int = 8192


class Bench:
    """A timer of kernels; `results`: time, bytes and share of the copy bandwidth by name."""

    def __init__(self, device: Device, library: KernelLibrary, bandwidth: float, sizes: Sizes) -> None:
        self.device, self.library, self.bandwidth, self.sizes = device, library, bandwidth, sizes
        self.results: dict[str, Any] = {}
        self._keep: list[torch.Tensor] = []
        self.parents = self.hold(device.ints([tree(sizes.nodes)]))
        self.tokens = self.hold(device.ints([list(range(sizes.nodes))]))
        self.position = self.hold(device.ints([sizes.capacity // 2]))

    def hold(self, tensor: torch.Tensor) -> int:
        """Return a tensor's address, and keep the tensor alive."""
        self._keep.append(tensor)
        return tensor.data_ptr()

    def add(self, name: str, launcher: str, params: Any, moved: int) -> None:
        """Time a kernel that moves `moved` bytes."""
        us = self.device.microseconds([lambda: self.library.launch(launcher, params, self.device.stream())])
        self.results[name] = {"us": us, "bytes": moved, "share": moved / us / 1e3 / self.bandwidth}

    def choose(self) -> None:
        """Time the choice of a token for each node, with sampling parameters of different cost."""
        device, hold, nodes, vocab = self.device, self.hold, self.sizes.nodes, self.sizes.vocab
        for name, request in {
            "choose greedy": Request(1, 1.0, -float("inf"), 0.0, 1.0, 0.0, 0.0, 0, 0, 0),
            "choose sampled": Request(1, 1.0, -float("inf"), 1.0, 1.0, 0.0, 0.0, 0, 0, 0),
            "choose top-k 50, top-p 0.9": Request(1, 0.9, -float("inf"), 1.0, 1.0, 0.0, 0.0, 50, 0, 0),
        }.items():
            raw = torch.frombuffer(bytearray(bytes(request)), dtype=torch.uint8).to(device.name)
            logits = hold(device.random(1, nodes, vocab, dtype="float32"))
            choose = Choose(logits=logits, requests=hold(raw), tokens=self.tokens)
            choose.parents, choose.root_position, choose.cut_offs = self.parents, self.position, int("top" in name)
            choose.choices, choose.tickets = hold(device.ints([[0] * nodes])), hold(device.ints([[0] * nodes]))
            choose.stride, choose.batch, choose.nodes, choose.tree_nodes = vocab, 1, nodes, nodes
            choose.vocab, choose.best, choose.dtype = vocab, 1, Dtype.F32
            room = self.library.workspace(choose) + 16
            choose.workspace = hold(torch.empty(room, dtype=torch.uint8, device=device.name))
            self.add(name, "choose_tokens", choose, 4 * nodes * vocab)

    def walk(self) -> None:
        """Time finding the accepted path through a tree."""
        device, hold, nodes = self.device, self.hold, self.sizes.nodes
        choices = hold(device.ints([[2 * i + 1 for i in range(nodes)]]))
        walk = Walk(tokens=self.tokens, parents=self.parents, choices=choices)
        for name in ("path", "emitted"):
            setattr(walk, name, hold(device.ints([[0] * nodes])))
        walk.length, walk.batch, walk.nodes = hold(device.ints([0])), 1, nodes
        self.add("walk", "walk_tree", walk, 6 * 4 * nodes)

    def commit(self) -> None:
        """Time moving the path's rows in the caches of all layers."""
        device, hold, sizes, nodes = self.device, self.hold, self.sizes, self.sizes.nodes
        rows = [device.random(sizes.kv_heads, sizes.capacity, sizes.size) for _ in range(2 * sizes.layers)]
        pointers = hold(torch.tensor([hold(each) for each in rows], dtype=torch.int64, device=device.name))
        path = [0, *(2 * i for i in range(1, nodes // 2)), *[-1] * (nodes - nodes // 2)]
        length, ticket = hold(device.ints([nodes // 2])), hold(device.ints([0]))
        commit = Commit(path=hold(device.ints([path])), length=length, ticket=ticket)
        commit.kept = hold(device.ints([0, 0]))
        commit.batch, commit.nodes, cache = 1, nodes, commit.caches[0]
        cache.layers, cache.base, cache.cache_len = pointers, self.position, hold(device.ints([0]))
        cache.count, cache.heads, cache.row_bytes = 2 * sizes.layers, sizes.kv_heads, 2 * sizes.size
        cache.capacity = sizes.capacity
        self.add("commit", "commit_path", commit, 2 * cache.count * cache.heads * cache.row_bytes * (nodes // 2 - 1))


def verify(device: Device, library: KernelLibrary, nodes: int, context: int, smoke: bool) -> dict[str, float]:
    """Time a step of an 8B-shaped model: only the matrix products and attention of 32 layers, and the head."""
    layers, widths = (
        (2, [(64, 192), (64, 64)]) if smoke else (32, [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)])
    )
    head = (64, 1000) if smoke else (4096, 128256)

    def product(inner: int, outer: int) -> Callable[[], Any]:
        x, weight = device.random(nodes, inner), device.random(outer, inner)
        return lambda: torch.nn.functional.linear(x, weight)

    products = sum(device.microseconds([product(*each) for _ in range(4)]) for each in widths)
    shape = Shape(1, nodes, 64 if smoke else context)
    attention = device.microseconds([Case(device, library, shape).run for _ in range(4)])
    last = device.microseconds([product(*head)])
    return {
        "us": layers * (products + attention) + last,
        "products_us": layers * products,
        "attention_us": layers * attention,
    }
