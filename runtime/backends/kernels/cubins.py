"""Launch the kernels in a bundle's cubins through the CUDA driver: a device loop needs no compiled library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from ctypes import c_void_p
from pathlib import Path
from typing import Any

from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import KernelRecord
from specbuild.runtime.errors import ExecutionError

from . import grids
from .abi import LAUNCHERS, KernelLibrary
from .interface import Kernels
from .library import find_library

_UNASKED = 16 * 1024  # bytes; more than this, plus a kernel's static shared memory, may exceed the default 48 KiB
# Not every bundle's loop has these, so they are looked up at their first launch.
_LATER = ("publish", *grids.ATTENTION, *grids.PRODUCTS)


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
    """The kernels of grids.py, in the CUDA context that is current when this is made and used; they end with it."""

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
        launched = grids.KERNELS | {"tree_attention": grids.ATTENTION, "block_product": grids.PRODUCTS}
        self._structs = {kernel: LAUNCHERS[name] for name, kernels in launched.items() for kernel in kernels}
        kernels = [kernel for kernel in self._structs if kernel not in _LATER]
        for kernel in sorted(kernels):
            self._file(kernel)
        self._driver = _driver()
        self._modules, self._functions, self._shared = dict[str, Any](), dict[str, Any](), dict[str, int]()
        for kernel in kernels:
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
        for kernel, x, y, z, threads, shared in grids.launches(name, params):
            function = self._function(kernel)
            if shared > max(_UNASKED, self._shared.get(kernel, 0)):
                attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._call("cuFuncSetAttribute", function, attribute, shared)
                self._shared[kernel] = shared
            arguments = (c_void_p * 1)(ctypes.addressof(params))
            where = stream, ctypes.addressof(arguments), 0
            self._call("cuLaunchKernel", function, x, y, z, threads, 1, 1, shared, *where)

    workspace, splits = staticmethod(grids.workspace), staticmethod(grids.splits)

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
