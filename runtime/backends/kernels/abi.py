"""The kernels' C interface (plugins/kernels.h) in Python: the same structs, and a library that launches the kernels.

A struct's pointers are addresses of device memory for a CUDA library, and of host memory for one that runs the kernels
on a CPU. Nothing is copied or converted: shapes and dtypes are in the struct, and the library refuses others.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

from specbuild.runtime.errors import ExecutionError, OptionError


class Dtype(IntEnum):
    """Element types (`specbuild_dtype`)."""

    F32 = 0
    F16 = 1
    BF16 = 2
    E4M3 = 3
    BOOL = 4
    INT8 = 5


class Fault(IntEnum):
    """A fault that a kernel found in memory that only the device sees (`specbuild_fault`)."""

    NONE = 0
    PARENT = 1
    CAPACITY = 2
    NODE = 3
    TOKEN = 4
    PAGE = 5


class Attention(ctypes.Structure):
    """Parameters of TreeAttention (`specbuild_attention`)."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "key", "value", "key_cache", "value_cache", "page_table", "parents")),
        *((name, c_void_p) for name in ("cache_len", "tree_offset", "counts", "cos", "sin", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("key_scale", "value_scale", "sinks", "output", "workspace", "fault")),
        *((name, c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, c_float) for name in ("scale", "softcap", "norm_epsilon")),
        *((name, c_int32) for name in ("window", "batch", "nodes", "tree_nodes", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("capacity", "page_rows", "rotary_dim", "positions", "splits", "dtype")),
        *((name, c_int32) for name in ("cache_dtype", "pages")),
    ]


class Product(ctypes.Structure):
    """Parameters of a product with a weight in blocks (`specbuild_product`)."""

    _fields_ = [
        *((name, c_void_p) for name in ("input", "codes", "factors", "output")),
        *((name, c_int32) for name in ("rows", "inner", "columns", "bits", "block", "scale_bits", "minimum_bits")),
        ("dtype", c_int32),
    ]


class Request(ctypes.Structure):
    """Sampling parameters of one sequence (`specbuild_request`)."""

    _fields_ = [
        ("seed", c_uint64),
        *((name, c_double) for name in ("top_p", "min_p_log")),
        *((name, c_float) for name in ("temperature", "repetition", "frequency", "presence")),
        *((name, c_int32) for name in ("top_k", "bias_begin", "bias_end")),
    ]


class Choose(ctypes.Structure):
    """Parameters of token choice (`specbuild_choose`)."""

    _fields_ = [
        *((name, c_void_p) for name in ("logits", "requests", "history", "masks", "bias_tokens", "bias_values")),
        *((name, c_void_p) for name in ("tokens", "parents", "row_nodes", "root_position", "counts", "choices")),
        *((name, c_void_p) for name in ("scores", "workspace", "tickets", "fault")),
        ("stride", c_int64),
        *((name, c_int32) for name in ("batch", "nodes", "tree_nodes", "vocab", "best", "cut_offs", "dtype")),
    ]


class Noise(ctypes.Structure):
    """Parameters of sampling noise alone, for tests (`specbuild_noise`)."""

    _fields_ = [
        *((name, c_void_p) for name in ("seeds", "positions", "noise")),
        *((name, c_int32) for name in ("rows", "vocab")),
    ]


class Walk(ctypes.Structure):
    """Parameters of the walk along a tree's accepted path (`specbuild_walk`)."""

    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "parents", "choices", "counts", "history")),
        *((name, c_void_p) for name in ("path", "length", "emitted", "roots", "pair", "fault")),
        *((name, c_int32) for name in ("batch", "nodes", "vocab", "trunk")),
    ]


class Cache(ctypes.Structure):
    """A KV cache in which rows are committed (`specbuild_cache`)."""

    _fields_ = [
        *((name, c_void_p) for name in ("layers", "page_table", "base", "node_rows", "cache_len")),
        *((name, c_int32) for name in ("count", "heads", "row_bytes", "capacity", "page_rows", "pages")),
    ]


class Commit(ctypes.Structure):
    """Parameters of committing accepted rows (`specbuild_commit`)."""

    _fields_ = [
        ("caches", Cache * 2),
        *((name, c_void_p) for name in ("path", "length", "kept", "ticket", "fault")),
        *((name, c_int32) for name in ("batch", "nodes")),
    ]


class Mask(ctypes.Structure):
    """Parameters of writing a tree's attention mask (`specbuild_mask`)."""

    _fields_ = [
        *((name, c_void_p) for name in ("parents", "cache_len", "tree_offset", "counts", "output", "positions")),
        *((name, c_void_p) for name in ("rows", "fault")),
        *((name, c_int32) for name in ("shift", "window", "batch", "nodes", "tree_nodes", "capacity", "dtype")),
    ]


class Shape(ctypes.Structure):
    """A draft tree's shape, and how far it has grown (`specbuild_growth`)."""

    _fields_ = [
        *((name, c_int32) for name in ("branch", "width", "expand", "depth", "nodes", "size", "level", "run", "done")),
    ]


class Grow(ctypes.Structure):
    """Parameters of growing draft trees (`specbuild_grow`)."""

    _fields_ = [
        *((name, c_void_p) for name in ("growths", "pool_tokens", "pool_parents", "pool_rows", "pool_scores")),
        *((name, c_void_p) for name in ("frontier", "level_counts", "roots", "root_position", "choices", "scores")),
        *((name, c_void_p) for name in ("level_tokens", "positions", "level_parents", "level_offset")),
        *((name, c_void_p) for name in ("tree_tokens", "tree_parents", "tree_counts", "tree_nodes", "node_rows")),
        ("fault", c_void_p),
        *((name, c_int32) for name in ("batch", "pool", "frontiers", "best", "rows", "nodes", "first")),
    ]


class Ring(ctypes.Structure):
    """Parameters of publishing a round's results to the host (`specbuild_ring`)."""

    _fields_ = [
        *((n, c_void_p) for n in "ring published round length emitted fault counts root_position ends stop".split()),
        *((name, c_uint64) for name in ("handle", "most")),
        *((name, c_int32) for name in ("rounds", "batch", "nodes")),
    ]


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "attention": Attention,
    "product": Product,
    "request": Request,
    "choose": Choose,
    "noise": Noise,
    "walk": Walk,
    "cache": Cache,
    "commit": Commit,
    "mask": Mask,
    "growth": Shape,
    "grow": Grow,
    "ring": Ring,
}
LAUNCHERS: dict[str, type[ctypes.Structure]] = {
    "tree_attention": Attention,
    "block_product": Product,
    "choose_tokens": Choose,
    "make_noise": Noise,
    "walk_tree": Walk,
    "commit_path": Commit,
    "tree_mask": Mask,
    "grow_level": Grow,
    "finish_tree": Grow,
    "publish": Ring,
}


class KernelLibrary:
    """A compiled library of the kernels, for CUDA or for the host."""

    def __init__(self, path: Path) -> None:
        """Load the library; raise ExecutionError if it does not load or was compiled from another header."""
        self.path = path
        try:
            self._library: Any = ctypes.CDLL(str(path))
            self._library.specbuild_error.restype = ctypes.c_char_p
            self._library.specbuild_struct_size.restype = ctypes.c_size_t
            for kernel in ("attention", "choose"):
                self._function(f"{kernel}_workspace").restype = ctypes.c_size_t
        except (OSError, AttributeError) as error:
            raise ExecutionError(f"{path} is no library of specbuild's kernels: {error}") from None
        for name, struct in STRUCTS.items():
            size = self._library.specbuild_struct_size(name.encode())
            if size != ctypes.sizeof(struct):
                raise ExecutionError(
                    f"{path} was compiled from another version, {name} has {size} bytes: compile it again"
                )

    def launch(self, name: str, params: ctypes.Structure, stream: int = 0) -> None:
        """Launch `specbuild_<name>` on a stream; return before it has run, except on the host.

        Args:
            name: A key of LAUNCHERS.
            params: The launcher's struct.
            stream: The CUDA stream's handle.

        Raises:
            OptionError: If the library refuses the parameters.
            ExecutionError: If CUDA fails.
        """
        if not isinstance(params, LAUNCHERS[name]):
            raise OptionError(f"{name} takes {LAUNCHERS[name].__name__}, not {type(params).__name__}")
        self._check(self._function(name)(ctypes.byref(params), c_void_p(stream)))

    def splits(self, params: Attention, processors: int) -> int:
        """Return into how many parts to split the context to keep `processors` multiprocessors busy."""
        return int(self._library.specbuild_attention_splits(ctypes.byref(params), processors))

    def workspace(self, params: Attention | Choose) -> int:
        """Return the bytes of workspace that TreeAttention or a token choice needs."""
        name = "attention_workspace" if isinstance(params, Attention) else "choose_workspace"
        return int(self._function(name)(ctypes.byref(params)))

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"specbuild_{name}")

    def _check(self, status: int) -> None:
        if status:
            message = self._library.specbuild_error().decode()
            raise OptionError(message) if status == 1 else ExecutionError(message)


__all__ = ["LAUNCHERS", "STRUCTS", "Dtype", "Fault", "KernelLibrary", *(struct.__name__ for struct in STRUCTS.values())]
