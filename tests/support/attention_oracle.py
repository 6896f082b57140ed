"""TreeAttention in NumPy, float64: what the kernel is compared with, and random cases to compare on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from device import Array

from specbuild.runtime.backends.kernels.abi import Attention, Dtype

NUMPY = {  # in float32, which no kernel has, comparisons are exact
    **{Dtype.F32: np.float32, Dtype.F16: np.float16},
    **{Dtype.BF16: ml_dtypes.bfloat16, Dtype.E4M3: ml_dtypes.float8_e4m3fn},
}
ARRAYS = (
    "query key value key_cache value_cache page_table parents cache_len tree_offset counts cos sin query_norm key_norm "
    "key_scale value_scale sinks"
).split()


@dataclass
class Case:
    """TreeAttention's arguments as arrays, by the names of `specbuild_attention`; caches are [B, Hkv, S, D]."""

    query: Array
    key: Array
    value: Array
    key_cache: Array
    value_cache: Array
    cache_len: Array
    dtype: Dtype
    cache_dtype: Dtype
    scale: float
    parents: Array | None = None
    tree_offset: Array | None = None
    counts: Array | None = None
    cos: Array | None = None
    sin: Array | None = None
    query_norm: Array | None = None
    key_norm: Array | None = None
    norm_epsilon: float = 1e-6
    key_scale: Array | None = None
    value_scale: Array | None = None
    sinks: Array | None = None
    softcap: float = 0.0
    window: int = 0
    splits: int = 1
    page_rows: int = 0
    page_table: Array | None = None
    change: dict[str, Any] = field(default_factory=dict)  # fields of the struct to spoil

    @property
    def batch(self):
        """Sequences."""
        return len(self.query)

    def real(self, b):
        """How many nodes of a sequence are no padding."""
        return self.query.shape[1] if self.counts is None else int(self.counts[b])

    def paged(self, page_rows, seed=0):
        """The same case on pages in random order."""
        batch, heads, capacity, size = self.key_cache.shape
        each = capacity // page_rows
        table = np.random.default_rng(seed).permutation(batch * each).astype(np.int32).reshape(batch, each)
        pages = []
        for cache in (self.key_cache, self.value_cache):
            page = np.zeros((batch * each, heads, page_rows, size), dtype=cache.dtype)
            page[table] = cache.reshape(batch, heads, each, page_rows, size).swapaxes(1, 2)
            pages.append(page)
        return replace(self, key_cache=pages[0], value_cache=pages[1], page_rows=page_rows, page_table=table)

    def linear(self, cache):
        """A cache as `[B, Hkv, S, D]`, a copy where it lies in pages."""
        if self.page_table is None:
            return cache
        heads, size = cache.shape[1], cache.shape[3]
        return cache[self.page_table].swapaxes(1, 2).reshape(self.batch, heads, -1, size)


def ancestors(parents):
    """`bool[M, M]`: row i is true at i and its ancestors."""
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def rounded(x, dtype):
    """To a narrow type; E4M3 saturates."""
    limit = 448.0 if dtype == Dtype.E4M3 else np.inf
    return np.clip(np.asarray(x, dtype=np.float32), -limit, limit).astype(NUMPY[dtype])


def _turn(x, norm, case, positions):
    """Norm and rotation of `[N, heads, D]`, float64."""
    x = x.astype(np.float64)
    if norm is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + case.norm_epsilon) * norm
    if case.cos is None or case.sin is None:
        return x
    half, rows = case.cos.shape[1], np.minimum(positions, len(case.cos) - 1)
    cos, sin = case.cos[rows][:, None].astype(np.float64), case.sin[rows][:, None].astype(np.float64)
    first, second = x[..., :half], x[..., half : 2 * half]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), -1)


def oracle(case):
    """The output `float64[B, N, H, D]`, and both caches, linear, after the call."""
    batch, nodes, heads, size = case.query.shape
    keys, values = case.linear(case.key_cache).copy(), case.linear(case.value_cache).copy()
    kv_heads = keys.shape[1]
    key_unit = np.ones(kv_heads) if case.key_scale is None else case.key_scale
    value_unit = np.ones(kv_heads) if case.value_scale is None else case.value_scale
    out = np.zeros((batch, nodes, heads, size))
    for b in range(batch):
        count, committed = case.real(b), int(case.cache_len[b])
        offset = 0 if case.tree_offset is None else int(case.tree_offset[b])
        if count == 0:
            continue
        tree_nodes = offset + count
        parents = np.arange(-1, tree_nodes - 1) if case.parents is None else case.parents[b, :tree_nodes]
        seen = ancestors(parents)
        depths = seen.sum(1) - 1
        positions = committed + depths[offset:]
        rows = slice(committed + offset, committed + tree_nodes)
        turned = _turn(case.key[b, :count], case.key_norm, case, positions) / key_unit[:, None]
        keys[b, :, rows] = rounded(turned, case.cache_dtype).swapaxes(0, 1)
        new = case.value[b, :count].astype(np.float64) / value_unit[:, None]
        values[b, :, rows] = rounded(new, case.cache_dtype).swapaxes(0, 1)
        query = rounded(_turn(case.query[b, :count], case.query_norm, case, positions), case.dtype).astype(np.float64)
        visible = np.ones((count, committed + tree_nodes), dtype=bool)
        visible[:, committed:] = seen[offset:]
        where = np.concatenate((np.arange(committed), committed + depths))
        if case.window:
            visible &= positions[:, None] - where < case.window
        for head in range(heads):
            kv = head * kv_heads // heads
            end = committed + tree_nodes
            scores = query[:, head] @ (keys[b, kv, :end].astype(np.float64) * key_unit[kv]).T * case.scale
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            scores[~visible] = -np.inf
            top = scores.max(1, keepdims=True)
            if case.sinks is not None:
                top = np.maximum(top, case.sinks[head])
            weights = np.exp(scores - top)
            total = weights.sum(1, keepdims=True) + (0 if case.sinks is None else np.exp(case.sinks[head] - top))
            out[b, :count, head] = weights / total @ (values[b, kv, :end].astype(np.float64) * value_unit[kv])
    return out, keys, values


def struct(case, kernels, output, fault, workspace):
    """The arguments as the kernels take them."""
    batch, nodes, heads, size = case.query.shape
    capacity = case.key_cache.shape[2] * (1 if case.page_table is None else case.page_table.shape[1])
    params = Attention(
        scale=case.scale,
        softcap=case.softcap,
        norm_epsilon=case.norm_epsilon,
        window=case.window,
        batch=batch,
        nodes=nodes,
        tree_nodes=nodes if case.parents is None else case.parents.shape[1],
        heads=heads,
        kv_heads=case.key_cache.shape[1],
        head_dim=size,
        capacity=capacity,
        page_rows=case.page_rows,
        pages=len(case.key_cache) if case.page_rows else 0,
        rotary_dim=0 if case.cos is None else 2 * case.cos.shape[1],
        positions=0 if case.cos is None else len(case.cos),
        splits=case.splits,
        dtype=case.dtype,
        cache_dtype=case.cache_dtype,
        query_stride=case.query.strides[1] // case.query.itemsize,
        key_stride=case.key.strides[1] // case.key.itemsize,
        value_stride=case.value.strides[1] // case.value.itemsize,
        output=kernels.at(output),
        fault=kernels.at(fault),
        workspace=kernels.at(workspace),
    )
    for name in ARRAYS:
        setattr(params, name, kernels.at(getattr(case, name)))
    for name, value in case.change.items():
        setattr(params, name, value)
    return params


def poisoned_workspace(case):
    """NaN everywhere: the parts, `[B · N · H, splits, D]`, then their weights, `[B · N · H, splits, 2]`."""
    batch, nodes, heads, size = case.query.shape
    return np.full(batch * nodes * heads * case.splits * (size + 2), np.nan, dtype=np.float32)


def run(kernels, case, linear=True, workspace=None):
    """What the kernel makes of copies of the caches: output, both caches, linear or as they lie, and the faults."""
    case = replace(case, key_cache=case.key_cache.copy(), value_cache=case.value_cache.copy())
    output = np.full(case.query.shape, np.nan, dtype=NUMPY[case.dtype])
    fault = np.zeros(case.batch, dtype=np.int32)
    workspace = poisoned_workspace(case) if workspace is None else workspace
    params = struct(case, kernels, output, fault, workspace if case.splits > 1 else None)
    kernels.launch("tree_attention", params)
    caches = case.key_cache, case.value_cache
    keys, values = (case.linear(cache) if linear else cache for cache in caches)
    return output, keys, values, fault


def random_case(
    seed,
    *,
    batch=2,
    nodes=5,
    heads=4,
    kv_heads=2,
    size=64,
    context=150,
    capacity=0,
    dtype=Dtype.BF16,
    cache_dtype=None,
    tree=True,
    offset=0,
    rotary=None,
    ragged=False,
    norm=False,
    sinks=False,
    **other,
):
    """Random ragged trees on random caches, NaN wherever nothing may be read."""
    rng = np.random.default_rng(seed)
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    tree_nodes, rotary = nodes + offset, size if rotary is None else rotary
    page = 16
    capacity = max(capacity, -(-(context + tree_nodes + 8) // page) * page)
    cache_len = rng.integers(context // 2, context + 1, batch).astype(np.int32)
    counts = rng.integers(0, nodes + 1, batch).astype(np.int32) if ragged else None
    scales = rng.uniform(0.5, 2.0, (2, kv_heads)).astype(np.float32) if cache_dtype == Dtype.E4M3 else None
    # query, key and value lie side by side, as one product leaves them.
    packed = rounded(rng.normal(0, 1, (batch, nodes, heads + 2 * kv_heads, size)), dtype)
    caches = np.full((2, batch, kv_heads, capacity, size), np.nan, dtype=NUMPY[cache_dtype])
    for b in range(batch):
        rows = int(cache_len[b]) + offset
        caches[:, b, :, :rows] = rounded(rng.normal(0, 1, (2, kv_heads, rows, size)), cache_dtype)
    parents = None
    if tree:
        lowest = [-1 if rng.random() < 0.2 else 0 for _ in range(batch)]  # some trees are a forest
        parents = np.array([[-1, *(rng.integers(low, i) for i in range(1, tree_nodes))] for low in lowest], np.int32)
    angles = np.arange(capacity)[:, None] / 10000 ** (np.arange(rotary // 2) / max(rotary // 2, 1))
    return Case(
        query=packed[:, :, :heads],
        key=packed[:, :, heads : heads + kv_heads],
        value=packed[:, :, heads + kv_heads :],
        key_cache=caches[0],
        value_cache=caches[1],
        cache_len=cache_len,
        dtype=dtype,
        cache_dtype=cache_dtype,
        scale=size**-0.5,
        parents=parents,
        tree_offset=np.full(batch, offset, dtype=np.int32) if offset else None,
        counts=counts,
        cos=np.cos(angles).astype(np.float32) if rotary else None,
        sin=np.sin(angles).astype(np.float32) if rotary else None,
        query_norm=rng.uniform(0.5, 1.5, size).astype(np.float32) if norm else None,
        key_norm=rng.uniform(0.5, 1.5, size).astype(np.float32) if norm else None,
        key_scale=None if scales is None else scales[0],
        value_scale=None if scales is None else scales[1],
        sinks=rng.normal(1, 2, heads).astype(np.float32) if sinks else None,
        **other,
    )
