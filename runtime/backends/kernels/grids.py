"""Compute which kernels a launcher of plugins/kernels.h starts, and refuse the sizes and null pointers that it refuses.

The library computes the same in C++, and tests compare the two. Only the alignment of addresses, which whole tensors
have, is not checked here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_void_p
from typing import Any, NamedTuple

from specbuild.runtime.errors import OptionError

from .abi import LAUNCHERS, Attention, Choose, Commit, Dtype, Grow, Mask, Product, Ring, Walk

# Limits from plugins/kernels.h, and CUDA's for y and z of a grid.
_NODES, _POOL, _BEST, _VOCAB, _GRID, _ANY = 64, 512, 64, 1 << 19, 65535, 2**31 - 1
_SLICE = 4096  # tokens per block in a choice
_PARTS, _MOST, _WARPS = 64, 1e30, 4  # of attention: splits, a bound on factors of scores, warps in a block
_LOGITS = ("F32", "F16", "BF16")
_MASKS = ("BOOL", *_LOGITS)
KERNELS = {
    "choose_tokens": tuple(f"choose_{cut}{dtype}" for cut in ("best_", "cuts_") for dtype in _LOGITS),
    "walk_tree": ("walk_tree",),
    "commit_path": ("commit_path",),
    "tree_mask": tuple(f"tree_mask_{dtype}" for dtype in _MASKS),
    "grow_level": ("grow_level",),
    "finish_tree": ("grow_finish",),
    "publish": ("publish",),
}  # kernels by launcher
_ROWS = {256: (32,)} | dict.fromkeys((64, 80, 96, 128), (16, 32, 64))  # of queries in an attention block, by head size
_TYPES = {Dtype.F16: "F16", Dtype.BF16: "BF16", Dtype.E4M3: "E4M3"}
ATTENTION = (
    *(
        f"tree_attention_{dtype}_{cache}_d{size}_r{rows}"
        for dtype in ("F16", "BF16")
        for cache in (dtype, "E4M3")
        for size in _ROWS
        for rows in _ROWS[size]
    ),
    *(f"tree_attention_combine_{dtype}" for dtype in ("F16", "BF16")),
)  # the kernels of "tree_attention", of which a bundle has those of its models' shapes

PRODUCTS = tuple(
    f"block_product_{dtype}_{bits}_t{tiles}"
    for dtype in ("F16", "BF16")
    for bits in (4, 5, 6, 8)
    for tiles in (1, 2, 8)
)  # the kernels of "block_product", of which a bundle has those of its models' weights


class Launch(NamedTuple):
    """A kernel and its grid: blocks, threads per block, and bytes of dynamic shared memory."""

    kernel: str
    x: int
    y: int
    z: int
    threads: int
    shared: int = 0


def launches(name: str, params: ctypes.Structure) -> list[Launch]:
    """Return what `specbuild_<name>` launches for a struct, in order; raise OptionError for what it would refuse."""
    if name not in _GRIDS:
        raise OptionError(f"{name} is not among the kernels that cubins are loaded for: {', '.join(_GRIDS)}")
    if not isinstance(params, LAUNCHERS[name]):
        raise OptionError(f"{name} takes {LAUNCHERS[name].__name__}, not {type(params).__name__}")
    return _GRIDS[name](params)


def splits(p: Attention, processors: int) -> int:
    """Return into how many parts to split the context to keep `processors` multiprocessors busy."""
    rows = _tile(p.head_dim, p.nodes * (p.heads // p.kv_heads))
    blocks = p.batch * p.kv_heads * _blocks(p.nodes * (p.heads // p.kv_heads), rows)
    return int(max(1, min(2 * processors // blocks, p.capacity // 128, _PARTS)))


def workspace(p: Attention | Choose) -> int:
    """Return the bytes of workspace that attention or a token choice needs."""
    if isinstance(p, Attention):
        return int(p.batch * p.nodes * p.heads * p.splits * (p.head_dim + 2) * 4) if p.splits > 1 else 0
    return int(p.batch * p.nodes * (_blocks(p.vocab, _SLICE) * p.best * 8 + 4))


def _tile(head_dim: int, queries: int) -> int:
    """Return the query rows of a block: the fewest that hold all of a head's, else the most."""
    return next((rows for rows in _ROWS[head_dim] if rows >= queries), _ROWS[head_dim][-1])


def _shared(head_dim: int, item: int, rows: int) -> int:
    """Return the bytes of shared memory of an attention block over a cache of `item` bytes a number (struct Tile)."""
    strides = [(head_dim * size // 16 | 1) * 16 for size in (item, 2)]
    stage = 2 * (64 if head_dim <= 128 else 32) * strides[0]
    stages = 2 if stage > 36 * 1024 else max(2, min(4, 72 * 1024 // stage))
    queries = (stages - (head_dim <= 128)) * stage
    return max(queries + rows * strides[1], stages * stage, _WARPS * 16 * (head_dim + 4) * 4)


def _attention(p: Attention) -> list[Launch]:
    dtype, cache, size = _TYPES.get(p.dtype), _TYPES.get(p.cache_dtype), p.head_dim
    _refuse(dtype not in ("F16", "BF16") or cache not in (dtype, "E4M3"), f"dtypes {p.dtype} and {p.cache_dtype}")
    _refuse(size not in _ROWS, f"head size {size}: {', '.join(map(str, _ROWS))}")
    optional = "page_table parents tree_offset counts cos sin query_norm key_norm key_scale value_scale sinks workspace"
    max_nodes = _NODES if p.parents else _ANY
    _check(p, f"{optional} fault", batch=_GRID, kv_heads=_ANY, nodes=max_nodes, capacity=_ANY, splits=_PARTS)
    _refuse(p.heads < p.kv_heads or p.heads % p.kv_heads > 0, f"{p.heads} heads for {p.kv_heads} of keys and values")
    tree = p.nodes <= p.tree_nodes <= _NODES if p.parents else p.nodes <= p.capacity
    _refuse(not tree, f"{p.nodes} nodes of a tree of {p.tree_nodes}, in a slot of {p.capacity} rows")
    _refuse(p.batch * p.nodes * p.heads > _ANY, f"{p.batch} sequences of {p.nodes} nodes with {p.heads} heads")
    page = p.page_rows
    paged = page > 0 and page & (page - 1) == 0 and p.capacity % page == 0 and p.pages > 0 and bool(p.page_table)
    _refuse(not paged if page or p.page_table else p.pages != 0, f"{p.pages} pages of {page} rows")
    rotated = 0 < p.rotary_dim <= size and p.rotary_dim % 16 == 0 and p.cos and p.sin and p.positions > 0
    _refuse(not rotated if p.rotary_dim or p.cos or p.sin else False, f"rotary dimension {p.rotary_dim}")
    _refuse(p.window < 0, f"window {p.window}")
    _refuse(not (0 <= p.softcap < _MOST and 0 < p.scale < _MOST), f"scale {p.scale}, soft-cap {p.softcap}")
    _refuse(bool(p.key_scale or p.value_scale) and cache != "E4M3", "scales are for a cache of E4M3")
    _refuse(bool(p.query_norm or p.key_norm) and not p.norm_epsilon >= 0, f"a norm's epsilon of {p.norm_epsilon}")
    for name, heads in (("query", p.heads), ("key", p.kv_heads), ("value", p.kv_heads)):
        stride = getattr(p, f"{name}_stride")
        _refuse(stride < heads * size or stride % 8 > 0, f"{name}'s stride is {stride}")
    _refuse(p.splits > 1 and not p.workspace, f"{p.splits} splits need a workspace")
    queries = p.nodes * (p.heads // p.kv_heads)
    rows = _tile(size, queries)
    tiles = p.kv_heads * _blocks(queries, rows)
    _refuse(tiles > _GRID, f"{p.nodes} nodes of {p.heads} heads")
    shared = _shared(size, 1 if cache == "E4M3" else 2, rows)
    each = Launch(f"tree_attention_{dtype}_{cache}_d{size}_r{rows}", p.splits, tiles, p.batch, 32 * _WARPS, shared)
    combine = _blocks(p.batch * p.nodes * p.heads, _WARPS)
    return [each, Launch(f"tree_attention_combine_{dtype}", combine, 1, 1, 32 * _WARPS)][: 1 + (p.splits > 1)]


def _product(p: Product) -> list[Launch]:
    dtype, block, rows = _TYPES.get(p.dtype), p.block, 8 * 65535
    _refuse(dtype not in ("F16", "BF16") or p.bits not in (4, 5, 6, 8), f"codes of {p.bits} bits in {dtype}")
    _refuse(block not in (16, 32, 64, 128) or (p.bits == 5 and block == 16), f"blocks of {block} columns")
    _check(p, "", rows=rows, inner=_ANY, columns=_ANY)
    _refuse(p.inner % block > 0, f"rows of {p.inner} numbers in blocks of {block}")
    minima = (0, 8, 32, p.scale_bits)
    _refuse(p.scale_bits not in (8, 16, 32) or p.minimum_bits not in minima, f"factors of {p.scale_bits} bits")
    tiles = next((tiles for tiles in (1, 2) if p.rows <= 8 * tiles), 8)
    kernel = f"block_product_{dtype}_{p.bits}_t{tiles}"
    return [Launch(kernel, _blocks(p.columns, 16), _blocks(p.rows, 8 * tiles), 1, 256)]


def _choose(p: Choose) -> list[Launch]:
    optional = "history masks bias_tokens bias_values parents row_nodes counts scores fault"
    _check(p, optional, batch=_GRID, nodes=_GRID, vocab=_VOCAB, best=_BEST, tree_nodes=_POOL)
    _refuse(p.stride < p.vocab, f"rows of {p.vocab} logits lie {p.stride} apart")
    _refuse(not p.row_nodes and p.nodes > p.tree_nodes, f"{p.nodes} rows of {p.tree_nodes} nodes need row_nodes")
    _refuse((p.bias_tokens is None) != (p.bias_values is None), "a bias needs both tokens and values")
    dtype = _dtype(p, _LOGITS)
    cut = Launch(f"choose_cuts_{dtype}", p.nodes, p.batch, 1, 1024, 4 * _blocks(p.vocab, 32))
    choose = Launch(f"choose_best_{dtype}", _blocks(p.vocab, _SLICE), p.nodes, p.batch, 256)
    return [cut, choose] if p.cut_offs else [choose]


def _walk(p: Walk) -> list[Launch]:
    _check(p, "parents counts history roots pair fault", batch=_ANY, nodes=_NODES)
    _refuse(bool(p.history) and p.vocab < 1, f"a history of a vocabulary of {p.vocab}")
    return [Launch("walk_tree", p.batch, 1, 1, 32)]


def _commit(p: Commit) -> list[Launch]:
    _check(p, "fault", batch=_GRID, nodes=_NODES)
    layers, columns = 0, 1
    for cache in p.caches:
        if cache.count == 0:
            continue
        _check(cache, "page_table node_rows", count=_GRID, heads=_ANY, row_bytes=_ANY, capacity=_ANY)
        size, rows, pages = cache.row_bytes, cache.page_rows, cache.pages
        _refuse(size % 8 > 0, f"rows of {size} bytes: use a multiple of 8")
        wrong = rows < 0 or rows & (rows - 1) or (pages < 1 or cache.capacity % rows if rows else pages)
        _refuse(bool(wrong) or bool(rows) != bool(cache.page_table), f"{pages} pages of {rows} rows")
        layers += cache.count
        columns = max(columns, cache.heads * (size // (8 if size % 16 else 16)))
    _refuse(not 1 <= layers <= _GRID, f"{layers} layers of keys and values in both caches")
    return [Launch("commit_path", _blocks(columns, 128), layers, p.batch, 128)]


def _mask(p: Mask) -> list[Launch]:
    tree = {"nodes": _NODES, "tree_nodes": _NODES} if p.parents else {"nodes": _ANY}
    _check(p, "parents tree_offset counts output positions rows fault", batch=_GRID, capacity=_ANY, **tree)
    _refuse(bool(p.parents) and p.tree_nodes < p.nodes, f"a tree of {p.tree_nodes} nodes for {p.nodes} new ones")
    _refuse(bool(p.rows) and p.capacity < p.nodes, f"{p.nodes} nodes in a cache slot of {p.capacity} rows")
    _refuse(p.window < 0, f"window {p.window}")
    return [Launch(f"tree_mask_{_dtype(p, _MASKS)}", _blocks(p.capacity, 1024) if p.output else 1, p.batch, 1, 256)]


def _grow(kernel: str) -> Callable[[Grow], list[Launch]]:
    def grids(p: Grow) -> list[Launch]:
        _check(p, "fault", batch=_ANY, pool=_POOL, nodes=_NODES, rows=_NODES, frontiers=_NODES, best=_BEST)
        _refuse(p.pool < 2 or p.nodes < 2, f"a pool of {p.pool} and a tree of {p.nodes} nodes: at least 2")
        return [Launch(kernel, p.batch, 1, 1, 256)]

    return grids


def _publish(p: Ring) -> list[Launch]:
    _check(p, "fault ends stop", batch=_GRID, nodes=_NODES, rounds=_ANY)
    return [Launch("publish", 1, 1, 1, 256)]


_GRIDS: dict[str, Callable[[Any], list[Launch]]] = {
    "tree_attention": _attention,
    "block_product": _product,
    "choose_tokens": _choose,
    "walk_tree": _walk,
    "commit_path": _commit,
    "tree_mask": _mask,
    "grow_level": _grow("grow_level"),
    "finish_tree": _grow("grow_finish"),
    "publish": _publish,
}


def _check(params: Any, optional: str, **limits: int) -> None:
    """Refuse null pointers that are not in `optional`, and sizes that are not from 1 to the limit given for them."""
    for name, limit in limits.items():
        value = getattr(params, name)
        _refuse(not 1 <= value <= limit, f"{name} is {value}: 1 to {limit}")
    for name, kind in params._fields_:
        _refuse(kind is c_void_p and not getattr(params, name) and name not in optional.split(), f"{name} is null")


def _dtype(params: Any, names: tuple[str, ...]) -> str:
    name = Dtype(params.dtype).name if params.dtype in set(Dtype) else "unknown"
    _refuse(name not in names, f"dtype {params.dtype} is {name}: use {', '.join(names)}")
    return name


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise OptionError(message)


def _blocks(count: int, each: int) -> int:
    return -(-count // each)
