"""Compiles the CUDA kernels to cubins with NVRTC, which comes as a wheel: it needs neither a CUDA toolkit nor a GPU.

A source that depends on the model is compiled once for each `Shape` or `Product`, any other source once. Each
compilation makes a file of its own, so that they run in parallel and a bundle holds only what its models need. The same
compiler produces the same bytes each time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from specbuild.builder.targets import HEAD_DIMS
from specbuild.runtime.errors import ExecutionError, OptionError

DTYPES = {"F16": ("F16", "E4M3"), "BF16": ("BF16", "E4M3")}  # types of caches, by type of activations
PRODUCT_BITS = 4, 5, 6, 8  # of a code
PLUGINS = Path(__file__).resolve().parents[2] / "plugins"  # beside `builder`, both in a clone and in a wheel
INSTALL = "pip install 'specbuild-trt[cuda]'"
# kernels.h also declares the launchers, which are host functions: without the second flag NVRTC refuses them.
# Where there is a driver, NVRTC keeps what it has compiled, and says nothing of it the second time.
FLAGS = ("-std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v", "--no-cache")

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class Shape:
    """A variant of TreeAttention: the head size, and the types of activations and cache. Raises OptionError."""

    macro: ClassVar[str] = "SPECBUILD_ONE_HEAD_DIM"  # in sources that depend on it
    head_dim: int
    dtype: str
    cache_dtype: str

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            sizes = ", ".join(map(str, HEAD_DIMS[:-1]))
            raise OptionError(f"head size {self.head_dim}: TreeAttention has {sizes} and {HEAD_DIMS[-1]}")
        if self.cache_dtype not in DTYPES.get(self.dtype, ()):
            pairs = ", ".join(f"{dtype} with {cache}" for dtype, caches in DTYPES.items() for cache in caches)
            raise OptionError(f"{self.dtype} with a cache of {self.cache_dtype}: TreeAttention has {pairs}")

    def __str__(self) -> str:
        return f"{self.dtype}_{self.cache_dtype}_d{self.head_dim}"

    @property
    def macros(self) -> list[str]:
        """Compiler options that leave out every other shape."""
        values = {"HEAD_DIM": self.head_dim, "DTYPE": self.dtype, "CACHE_DTYPE": self.cache_dtype}
        return [f"-DSPECBUILD_ONE_{name}={value}" for name, value in values.items()]


@dataclass(frozen=True, slots=True)
class Product:
    """A variant of products with weights in blocks: the type of activations, and the bits of a code."""

    macro: ClassVar[str] = "SPECBUILD_ONE_BITS"  # in sources that depend on it
    dtype: str
    bits: int

    def __str__(self) -> str:
        return f"{self.dtype}_{self.bits}"

    @property
    def macros(self) -> list[str]:
        """Compiler options that leave out every other variant."""
        return [f"-DSPECBUILD_ONE_DTYPE={self.dtype}", f"-DSPECBUILD_ONE_BITS={self.bits}"]


Variant = Shape | Product
PRODUCTS = tuple(Product(dtype, bits) for dtype in DTYPES for bits in PRODUCT_BITS)
SHAPES = tuple(Shape(size, dtype, cache) for size in HEAD_DIMS for dtype, caches in DTYPES.items() for cache in caches)


@dataclass(frozen=True, slots=True)
class Resources:
    """A kernel's resources by the compiler's report: registers per thread, others in bytes (`shared`: static part)."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """The result of one compilation.

    Attributes:
        architecture: The GPU architecture, such as "90".
        name: The path in a bundle, without `kernels/` and suffix.
        image: The cubin.
        kernels: What each kernel uses, by name.
        log: What the compiler wrote.
    """

    architecture: str
    name: str
    image: bytes
    kernels: dict[str, Resources]
    log: str


def sources() -> list[Path]:
    """Return the files of plugins/kernels that have kernels; raise ExecutionError if there is none."""
    found = [p for p in sorted((PLUGINS / "kernels").glob("*.cu")) if "__global__" in p.read_text(encoding="utf-8")]
    if not found:
        raise ExecutionError(f"{PLUGINS} has no kernels: install specbuild again")
    return found


def compiler_version() -> str:
    """Return NVRTC's version, such as "13.5"; raise OptionError if it is not installed."""
    _, version = _nvrtc()
    return version


def check_compiler(wanted: Sequence[str]) -> None:
    """Raise OptionError if NVRTC is missing or does not know an architecture; call it before a long build."""
    nvrtc, version = _nvrtc()
    status, known = nvrtc.nvrtcGetSupportedArchs()
    for name in wanted:
        if status or int(name) not in known:
            raise OptionError(f"NVRTC {version} does not know sm_{name}: install a newer one, {INSTALL}")


def compile_source(source: Path, architecture: str, variant: Variant | None = None) -> Cubin:
    """Compile one source for one architecture.

    Args:
        source: The file.
        architecture: The GPU architecture, such as "90".
        variant: The variant, for a source that depends on the model.

    Raises:
        OptionError: NVRTC is not installed.
        ExecutionError: The source does not compile.
    """
    nvrtc, _ = _nvrtc()
    name = f"sm_{architecture}/{source.stem}" + (f"_{variant}" if variant else "")
    flags = [*FLAGS, f"-I{PLUGINS}", f"-arch=sm_{architecture}", *(variant.macros if variant else ())]
    options = [flag.encode() for flag in flags]
    status, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], [])
    if status:
        raise ExecutionError(f"{name}: NVRTC cannot start ({status.name}): {INSTALL}")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0 \n").decode()
        if status:
            first = next((line for line in log.splitlines() if "error" in line or "fatal" in line), status.name)
            raise ExecutionError(f"{name} does not compile: {first.strip()}")
        image = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Cubin(architecture, name, image, parse_report(log), log)


def compile_kernels(
    wanted: Sequence[str], variants: Iterable[Variant], files: Sequence[Path] | None = None, jobs: int | None = None
) -> list[Cubin]:
    """Compile every source for every architecture, one that depends on the model for its variants, in parallel.

    Args:
        wanted: The GPU architectures.
        variants: Those of sources that depend on the model.
        files: The sources, all by default.
        jobs: How many threads compile, by default one per core.

    Raises:
        OptionError: NVRTC is not installed, or does not know an architecture.
        ExecutionError: A source does not compile.
    """
    check_compiler(wanted)
    every, work = list(dict.fromkeys(variants)), list[tuple[Path, str, Variant | None]]()
    for source in sources() if files is None else files:
        text = source.read_text(encoding="utf-8")
        depends = any(kind.macro in text for kind in (Shape, Product))
        own = [each for each in every if each.macro in text] if depends else [None]
        work += [(source, name, variant) for name in wanted for variant in own]
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:  # NVRTC compiles without holding the GIL
        running = [pool.submit(compile_source, *item) for item in work]
        try:
            return [cubin.result() for cubin in running]
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def parse_report(log: str) -> dict[str, Resources]:
    """Return what each kernel uses, together with the functions it calls, from the output of ptxas -v.

    NVRTC's log and nvcc's differ only in how lines begin. Raises ExecutionError for any other log.
    """
    pieces = _ENTRY.split(log)[1:]
    found = {}
    for kernel, text in zip(pieces[::2], pieces[1::2], strict=True):
        frames = [tuple(map(int, frame)) for frame in _FRAME.findall(text)]
        registers, shared = _REGISTERS.search(text), _SHARED.search(text)
        if not frames or not registers:
            raise ExecutionError(f"the compiler's report on {kernel} is not understood: use another version of NVRTC")
        stack, stores, loads = (sum(column) for column in zip(*frames, strict=True))
        found[kernel] = Resources(int(registers[1]), stack, stores, loads, int(shared[1]) if shared else 0)
    if not found:
        raise ExecutionError("the compiler's report names no kernel: use another version of NVRTC")
    return found


def report(cubins: Iterable[Cubin]) -> dict[str, Any]:
    """Return the report's entry on kernels: the compiler's version, and what each uses, by architecture and name."""
    table: dict[str, dict[str, Any]] = {}
    for cubin in cubins:
        kernels = table.setdefault(f"sm_{cubin.architecture}", {})
        kernels.update({kernel: asdict(resources) for kernel, resources in cubin.kernels.items()})
    return {"compiler": f"NVRTC {compiler_version()}", "architectures": table}


def spills(cubins: Iterable[Cubin]) -> list[str]:
    """Return a line for each kernel that spills registers: "sm_80 name: 4 bytes stored, 8 loaded"."""
    lines = [
        f"sm_{cubin.architecture} {kernel}: {taken.spill_stores} bytes stored, {taken.spill_loads} loaded"
        for cubin in cubins
        for kernel, taken in cubin.kernels.items()
        if taken.spill_stores or taken.spill_loads
    ]
    return list(dict.fromkeys(lines))


def _nvrtc() -> tuple[Any, str]:
    """Return NVRTC's bindings and version; raise OptionError if it is not installed or does not answer."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):  # the bindings are missing, or find no library
        raise OptionError(f"compiling kernels needs NVRTC, which is not installed: {INSTALL}") from None
    if status:
        raise OptionError(f"NVRTC does not answer ({status.name}): {INSTALL}")
    return nvrtc, f"{major}.{minor}"


def _text(size: Any, fill: Any, program: Any) -> bytes:
    """Return what NVRTC writes into a buffer of the size that it asks for."""
    _, count = size(program)
    buffer = bytes(count)
    fill(program, buffer)
    return buffer
