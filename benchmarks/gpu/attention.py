"""One case of TreeAttention: its shape, its inputs, and the peers that it is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from benchmarks.gpu.device import Device
from specbuild.runtime.backends.kernels.abi import Attention, Dtype, KernelLibrary

DTYPES = {"float16": Dtype.F16, "bfloat16": Dtype.BF16, "float8_e4m3fn": Dtype.E4M3}


@dataclass(frozen=True)
class Shape:
    """The shape and types of a case."""

    batch: int
    nodes: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    dtype: str = "bfloat16"
    cache: str = "bfloat16"
    capacity: int = 0  # rows of a cache slot, which determine the splits; 0: as many as context and nodes need

    def label(self) -> dict[str, Any]:
        """Return the fields by which a row of the table tells the shape: those without a default value, or another."""
        defaults = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    @property
    def rows(self) -> int:
        """Rows of a cache slot."""
        return self.capacity or self.context + self.nodes

    @property
    def bytes(self) -> int:
        """Bytes that must be moved: the visible cache and the new rows once, queries and output once."""
        rows = self._cache_bytes(self.context + 2 * self.nodes)
        return rows + 2 * self.batch * self.nodes * self.heads * self.size * 2

    @property
    def held(self) -> int:
        """Bytes of the caches, including rows that no node sees."""
        return self._cache_bytes(self.rows)

    def _cache_bytes(self, rows: int) -> int:
        each = torch.empty(0, dtype=getattr(torch, self.cache)).element_size()
        return 2 * self.batch * self.kv_heads * rows * self.size * each


def tree(nodes: int) -> list[int]:
    """Return the parents of a binary tree."""
    return [(node - 1) // 2 if node else -1 for node in range(nodes)]


class Case:
    """One set of inputs for TreeAttention and its peers."""

    def __init__(self, device: Device, library: KernelLibrary, shape: Shape) -> None:
        self.device, self.library, self.shape = device, library, shape
        b, n, h, k, d = shape.batch, shape.nodes, shape.heads, shape.kv_heads, shape.size
        self.qkv = device.random(b, n, h + 2 * k, d, dtype=shape.dtype)
        self.cache = device.random(2, b, k, shape.rows, d, dtype=shape.cache)
        self.parents = device.ints([tree(n)] * b)
        self.cache_len = device.ints([shape.context] * b)
        self.fault = device.ints([0] * b)
        self.output = torch.full((b, n, h, d), float("nan"), dtype=getattr(torch, shape.dtype), device=device.name)
        self.params = Attention(
            query=self.qkv.data_ptr(),
            key=self.qkv[:, :, h:].data_ptr(),
            value=self.qkv[:, :, h + k :].data_ptr(),
            key_cache=self.cache[0].data_ptr(),
            value_cache=self.cache[1].data_ptr(),
            parents=self.parents.data_ptr(),
            cache_len=self.cache_len.data_ptr(),
            fault=self.fault.data_ptr(),
            output=self.output.data_ptr(),
            scale=d**-0.5,
            batch=b,
            nodes=n,
            tree_nodes=n,
            heads=h,
            kv_heads=k,
            head_dim=d,
            capacity=shape.rows,
            dtype=DTYPES[shape.dtype],
            cache_dtype=DTYPES[shape.cache],
        )
        for name in ("query_stride", "key_stride", "value_stride"):
            setattr(self.params, name, (h + 2 * k) * d)
        self.params.splits = library.splits(self.params, device.processors)
        self.workspace = torch.empty(library.workspace(self.params) // 4 + 4, device=device.name)
        self.params.workspace = self.workspace.data_ptr() if self.params.splits > 1 else None

    def run(self) -> None:
        """Launch the kernel once."""
        self.library.launch("tree_attention", self.params, self.device.stream())

    def mask(self) -> torch.Tensor:
        """Return `bool[N, S]`: the positions that each node sees."""
        n = self.shape.nodes
        seen = torch.eye(n, dtype=torch.bool)
        for node, parent in enumerate(tree(n)):
            if parent >= 0:
                seen[node] |= seen[parent]
        return torch.cat((torch.ones(n, self.shape.context, dtype=torch.bool), seen), 1).to(self.device.name)

    def error(self) -> float:
        """Return ‖out − ref‖ / ‖ref‖ against a float64 reference, on the cache as the kernel left it."""
        self.run()
        if self.device.name == "cuda":
            torch.cuda.synchronize()
        assert not self.fault.any()
        b, n, h, k, d = self.shape.batch, self.shape.nodes, self.shape.heads, self.shape.kv_heads, self.shape.size
        mask, off, end = self.mask(), 0.0, self.shape.context + n
        whole = 0.0
        for sequence, head in itertools.product(range(b), range(k)):  # one at a time, since float64 takes much memory
            query = self.qkv[sequence, :, :h].view(n, k, h // k, d)[:, head].double()
            keys, values = (self.cache[i, sequence, head, :end].double() for i in range(2))
            scores = torch.einsum("ngd,sd->gns", query, keys) * self.params.scale
            reference = torch.einsum("gns,sd->ngd", scores.masked_fill(~mask, -torch.inf).softmax(-1), values)
            got = self.output[sequence].view(n, k, h // k, d)[:, head].double()
            off += float(((got - reference) ** 2).sum())
            whole += float((reference**2).sum())
        return (off / whole) ** 0.5

    def peer(self, name: str) -> Callable[[], Any]:
        """Return a launch of a peer's attention over the same cache, without appending to it.

        `name`: "sdpa", "flex" or "flashinfer". A peer's own errors are not caught.
        """
        h, shape = self.shape.heads, self.shape
        query = self.qkv[:, :, :h].transpose(1, 2).contiguous()
        end, mask = shape.context + shape.nodes, self.mask()
        keys, values = (each[:, :, :end].to(query.dtype) for each in self.cache)
        if name == "sdpa":
            attention = torch.nn.functional.scaled_dot_product_attention
            return lambda: attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        if name == "flex":
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            block = create_block_mask(lambda b, h, i, j: mask[i, j], None, None, shape.nodes, end)
            flex = torch.compile(flex_attention, dynamic=False)
            return lambda: flex(query, keys, values, block_mask=block, enable_gqa=True)
        import flashinfer

        q, k, v = query[0].transpose(0, 1), keys[0].transpose(0, 1), values[0].transpose(0, 1)
        return lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask, kv_layout="NHD")
