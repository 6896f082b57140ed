"""The kernels around the attention, and what one verification costs: part of benchmarks/kernels.py.

Their inputs stay in the L2 cache from launch to launch, as they do in a round: the share of the copy bandwidth says how
far they are from moving bytes, not from memory's speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attention_case import Case, Shape, tree
from gpu import Device

from specbuild.runtime.backends.kernels.abi import (
    Choose,
    Commit,
    Dtype,
    Gather,
    KernelLibrary,
    Norm,
    Request,
    SwiGLU,
    Walk,
)


def others(device: Device, library: KernelLibrary, bandwidth: float, smoke: bool) -> dict[str, Any]:
    """The kernels around the attention, at the sizes of an 8B-shaped model: batch 1, 16 nodes, vocabulary 128,256."""
    nodes, vocab, layers, width = (4, 1000, 2, 64) if smoke else (16, 128256, 32, 4096)
    hidden, kv_heads, size, capacity = (96, 2, 64, 64) if smoke else (14336, 8, 128, 8192)
    results: dict[str, Any] = {}
    keep: list[Any] = []

    def hold(tensor: torch.Tensor) -> int:
        keep.append(tensor)
        return tensor.data_ptr()

    def add(name: str, launcher: str, params: Any, moved: int) -> None:
        us = device.microseconds([lambda: library.launch(launcher, params, device.stream())])
        results[name] = {"us": us, "bytes": moved, "share": moved / us / 1e3 / bandwidth}

    parents = hold(device.ints([tree(nodes)]))
    tokens, position = hold(device.ints([list(range(nodes))])), hold(device.ints([capacity // 2]))
    for name, request in {
        "choose greedy": Request(1, 1.0, -float("inf"), 0.0, 1.0, 0.0, 0.0, 0, 0, 0),
        "choose sampled": Request(1, 1.0, -float("inf"), 1.0, 1.0, 0.0, 0.0, 0, 0, 0),
        "choose top-k 50, top-p 0.9": Request(1, 0.9, -float("inf"), 1.0, 1.0, 0.0, 0.0, 50, 0, 0),
    }.items():
        raw = torch.frombuffer(bytearray(bytes(request)), dtype=torch.uint8).to(device.name)
        choose = Choose(logits=hold(device.random(1, nodes, vocab, dtype="float32")), requests=hold(raw), tokens=tokens)
        choose.parents, choose.root_position, choose.cut_offs = parents, position, int("top" in name)
        choose.choices, choose.tickets = hold(device.ints([[0] * nodes])), hold(device.ints([[0] * nodes]))
        choose.stride, choose.batch, choose.nodes, choose.tree_nodes = vocab, 1, nodes, nodes
        choose.vocab, choose.best, choose.dtype = vocab, 1, Dtype.F32
        choose.workspace = hold(torch.empty(library.workspace(choose) + 16, dtype=torch.uint8, device=device.name))
        add(name, "choose_tokens", choose, 4 * nodes * vocab)
    walk = Walk(tokens=tokens, parents=parents, choices=hold(device.ints([[2 * i + 1 for i in range(nodes)]])))
    for name in ("path", "emitted"):
        setattr(walk, name, hold(device.ints([[0] * nodes])))
    walk.length, walk.batch, walk.nodes = hold(device.ints([0])), 1, nodes
    add("walk", "walk_tree", walk, 6 * 4 * nodes)
    rows = [device.random(kv_heads, capacity, size) for _ in range(2 * layers)]
    pointers = hold(torch.tensor([hold(each) for each in rows], dtype=torch.int64, device=device.name))
    path = [0, *(2 * i for i in range(1, nodes // 2)), *[-1] * (nodes - nodes // 2)]
    commit = Commit(
        path=hold(device.ints([path])), length=hold(device.ints([nodes // 2])), ticket=hold(device.ints([0]))
    )
    commit.kept = hold(device.ints([0, 0]))
    commit.batch, commit.nodes, cache = 1, nodes, commit.caches[0]
    cache.layers, cache.base, cache.cache_len = pointers, position, hold(device.ints([0]))
    cache.count, cache.heads, cache.row_bytes, cache.capacity = 2 * layers, kv_heads, 2 * size, capacity
    add("commit", "commit_path", commit, 2 * 2 * layers * kv_heads * 2 * size * (nodes // 2 - 1))
    x, y = hold(device.random(nodes, width)), hold(device.random(nodes, width))
    norm = Norm(x=x, y=y, weight=hold(device.random(width, dtype="float32")), epsilon=1e-5, rows=nodes, width=width)
    norm.sum, norm.output, norm.dtype = hold(device.random(nodes, width)), hold(device.random(nodes, width)), Dtype.BF16
    norm.output_dtype = Dtype.BF16
    add("residual + RMS norm", "rms_norm", norm, 8 * nodes * width)
    both = device.random(nodes, 2 * hidden)
    swiglu = SwiGLU(gate=hold(both), up=hold(both[:, hidden:]), output=hold(device.random(nodes, hidden)))
    swiglu.stride, swiglu.rows, swiglu.width, swiglu.dtype = 2 * hidden, nodes, hidden, Dtype.BF16
    add("SwiGLU", "swiglu_gate", swiglu, 6 * nodes * hidden)
    gather = Gather(table=hold(device.random(vocab, width)), ids=tokens, output=x, rows=nodes, vocab=vocab)
    gather.row_bytes = 2 * width
    add("embedding rows", "gather_rows", gather, 4 * nodes * width)
    results["verify"] = verify(device, library, nodes, capacity, smoke)
    for choice in ("choose sampled", "choose top-k 50, top-p 0.9"):
        glue = sum(results[name]["us"] for name in (choice, "walk", "commit"))
        results[f"{choice} + walk + commit, of verify"] = glue / results["verify"]["us"]
    return results


def verify(device: Device, library: KernelLibrary, nodes: int, context: int, smoke: bool) -> dict[str, float]:
    """A step of an 8B-shaped model: matrix products and attention of 32 layers, and the head; nothing else."""
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
