"""Launch the kernels in a bundle's cubins through the CUDA driver: a device loop needs no compiled library.

The launch grids that the library computes in C++ are computed here in Python, and tests compare the two. Bad sizes and
null pointers are refused as in the library; the alignment of addresses, which whole tensors have, is not checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from ctypes import c_void_p
from pathlib import Path
from typing import Any, NamedTuple

from specbuild.runtime.backends.gpu.device import Kernels
from specbuild.runtime.backends.gpu.library import find_library
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import KernelRecord
from specbuild.runtime.errors import ExecutionError, OptionError

from .abi import LAUNCHERS, Choose, Commit, Dtype, Grow, KernelLibrary, Mask, Ring, Walk

# Limits from plugins/kernels.h, and CUDA's for y and z of a grid.
_NODES, _POOL, _BEST, _VOCAB, _GRID, _ANY = 64, 512, 64, 1 << 19, 65535, 2**31 - 1
_SLICE = 4096  # tokens per block in a choice
_UNASKED = 16 * 1024  # bytes; more than this, plus a kernel's static shared memory, may exceed the default 48 KiB
_LOGITS = ("F32", "F16", "BF16")
_MASKS = ("BOOL", *_LOGITS)
KERNELS = {
    "choose_tokens": tuple(f"choose_{cut}{dtype}" for cut in ("", "cuts_") for dtype in _LOGITS),
    "walk_tree": ("walk_tree",),
    "commit_path": ("commit_path",),
    "tree_mask": tuple(f"tree_mask_{dtype}" for dtype in _MASKS),
    "grow_level": ("grow_level",),
    "finish_tree": ("grow_finish",),
    "publish": ("publish",),
}  # kernels by launcher
_LATER = "publish"  # used by resident rounds only, so it is looked up at its first launch


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


def best_architecture(compiled: Iterable[str], device: str) -> str | None:
    """Return which compiled architecture ("90", "86") suits a device of compute capability `device` ("90"), or None.

    It is the device's own, else the highest lower one of the same major version. Names such as "90a", in bundles built
    before, suit only their own device, and so does 87, which is no desktop GPU's.
    """
    fits = [
        name
        for name in compiled
        if name.removesuffix("a") == device
        or (name.isdigit() and name[:-1] == device[:-1] and int(name) < int(device) and "87" not in (name, device))
    ]
    return max(fits, key=lambda name: int(name.removesuffix("a")), default=None)


def find_kernels(bundle: Bundle, architecture: str) -> Kernels:
    """Return the bundle's kernels for a compute capability ("90"), else the installed library's.

    Raises:
        ExecutionError: If there are neither, or they cannot be loaded.
    """
    records = bundle.manifest.kernels
    if best_architecture((record.architecture for record in records.values()), architecture):
        return CubinKernels(bundle.folder, records, architecture, bundle.read)
    if path := find_library():
        return KernelLibrary(path)
    raise ExecutionError(
        f"{bundle.folder} has no kernels for compute capability {architecture}: build it with "
        f"`specbuild build --cuda-arch {architecture}`, or compile them here with `SPECBUILD_CUDA=1 pip install .`"
    )


class CubinKernels:
    """The kernels of KERNELS, in the CUDA context that is current when this is made and used; they end with it."""

    def __init__(
        self,
        folder: Path,
        records: Mapping[str, KernelRecord],
        architecture: str,
        read: Callable[[str], bytes] | None = None,
    ) -> None:
        """Load the kernels for a device.

        Args:
            folder: The folder of the cubins.
            records: The manifest's kernel records, by file in `folder`.
            architecture: The device's compute capability, such as "90".
            read: Returns a file's hash-checked bytes by its name; None: read files of no bundle from `folder`,
                unchecked.

        Raises:
            ExecutionError: If a kernel is missing or of another version, or there is no driver.
        """
        best = best_architecture((record.architecture for record in records.values()), architecture)
        self._files = {name: file for file, r in records.items() if r.architecture == best for name in r.kernels}
        self._read = read or (lambda name: (folder / name).read_bytes())
        self._architecture, self._folder = architecture, folder
        self._structs = {kernel: LAUNCHERS[name] for name, kernels in KERNELS.items() for kernel in kernels}
        wanted = [kernel for kernel in self._structs if kernel != _LATER]
        for kernel in sorted(wanted):
            self._file(kernel)
        self._driver = _driver()
        self._modules, self._functions, self._shared = dict[str, Any](), dict[str, Any](), dict[str, int]()
        for kernel in wanted:
            self._function(kernel)

    def _file(self, kernel: str) -> str:
        if kernel in self._files:
            return self._files[kernel]
        raise ExecutionError(
            f"{self._folder} has no kernel {kernel} for compute capability {self._architecture}: build it again with "
            f"--cuda-arch {self._architecture}"
        )

    def _function(self, kernel: str) -> Any:
        """Return a kernel, loading it on first use."""
        if kernel not in self._functions:
            path = self._file(kernel)
            if path not in self._modules:
                self._modules[path] = self._load(path)
            function = self._call("cuModuleGetFunction", self._modules[path], kernel.encode())
            _, size = self._call("cuFuncGetParamInfo", function, 0)
            if size != ctypes.sizeof(self._structs[kernel]):
                raise ExecutionError(
                    f"{self._folder / path} is of another version, {kernel} takes {size} bytes: build it again"
                )
            self._functions[kernel] = function
        return self._functions[kernel]

    def launch(self, name: str, params: ctypes.Structure, stream: int = 0) -> None:
        """Launch `specbuild_<name>` on a stream, and return before it has run.

        Raises OptionError if the parameters are refused, and ExecutionError if CUDA fails.
        """
        for kernel, x, y, z, threads, shared in launches(name, params):
            function = self._function(kernel)
            if shared > max(_UNASKED, self._shared.get(kernel, 0)):
                attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call("cuFuncSetAttribute", function, attribute, shared)
                self._shared[kernel] = shared
            arguments = (c_void_p * 1)(ctypes.addressof(params))
            where = stream, ctypes.addressof(arguments), 0
            self._call("cuLaunchKernel", function, x, y, z, threads, 1, 1, shared, *where)

    @staticmethod
    def workspace(params: Any) -> int:
        """Return the bytes of workspace that a token choice needs; raise OptionError for other structs."""
        if not isinstance(params, Choose):
            raise OptionError(f"a workspace is a choice's, {type(params).__name__} is not among these kernels")
        return int(params.batch * params.nodes * (_blocks(params.vocab, _SLICE) * params.best * 8 + 4))

    def _load(self, name: str) -> Any:
        try:
            return self._call("cuModuleLoadData", self._read(name))
        except OSError as error:
            raise ExecutionError(
                f"{self._folder / name} cannot be read ({error.strerror}): build the bundle again"
            ) from None

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if status:
            raise ExecutionError(f"CUDA: {name}: {status.name}")
        return results[0] if len(results) == 1 else results


def _driver() -> Any:
    """Import and initialise the driver's bindings; raise ExecutionError if that fails."""
    try:
        from cuda.bindings import driver

        (status,) = driver.cuInit(0)
    except ImportError:
        raise ExecutionError("launching kernels needs cuda-bindings: pip install 'specbuild-trt[cuda]'") from None
    except RuntimeError:  # raised by bindings that find no driver
        raise ExecutionError("launching kernels needs NVIDIA's driver, and there is none on this machine") from None
    if status:
        raise ExecutionError(f"CUDA's driver does not start ({status.name}): see what nvidia-smi says")
    return driver


def _choose(p: Choose) -> list[Launch]:
    optional = "history masks bias_tokens bias_values parents row_nodes counts scores fault"
    _check(p, optional, batch=_GRID, nodes=_GRID, vocab=_VOCAB, best=_BEST, tree_nodes=_POOL)
    _refuse(p.stride < p.vocab, f"rows of {p.vocab} logits lie {p.stride} apart")
    _refuse(not p.row_nodes and p.nodes > p.tree_nodes, f"{p.nodes} rows of {p.tree_nodes} nodes need row_nodes")
    _refuse((p.bias_tokens is None) != (p.bias_values is None), "a bias needs both tokens and values")
    dtype = _dtype(p, _LOGITS)
    cut = Launch(f"choose_cuts_{dtype}", p.nodes, p.batch, 1, 1024, 4 * _blocks(p.vocab, 32))
    choose = Launch(f"choose_{dtype}", _blocks(p.vocab, _SLICE), p.nodes, p.batch, 256)
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
    _check(p, "fault stop", batch=_GRID, nodes=_NODES, rounds=_ANY)
    return [Launch("publish", 1, 1, 1, 256)]


_GRIDS: dict[str, Callable[[Any], list[Launch]]] = {
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
