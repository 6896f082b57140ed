"""How engines are compiled: the options of TensorRT that `specbuild build` offers, and those of its attention."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from specbuild.builder.targets import split_names
from specbuild.runtime.backends.kernels.library import BLOCK_SIZES
from specbuild.runtime.bundle.backend import BACKENDS, COMPILED, RTX_ARCHITECTURES, Backend
from specbuild.runtime.errors import OptionError, shown

HARDWARE = {"ampere-plus": "AMPERE_PLUS", "same-compute-capability": "SAME_COMPUTE_CAPABILITY"}
ATTENTIONS = ("plugin", "native")
KV_CACHE_DTYPES = ("auto", "fp8")
FP8_FROM = 89  # the first architecture with E4M3 products
_FIRST = {"fp8": (FP8_FROM, "int8"), "int4": (80, "int8"), "bf16": (80, "fp16")}  # first architecture, fallback
_TIMED = ("timing_cache", "version_compatible", "hardware_compatible")  # only for a backend that times kernels


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options for compiling engines, by default TensorRT's own. Raises OptionError for an invalid value.

    Attributes:
        arch: TensorRT-RTX's targets, as `architectures` reads them.
        attention: "plugin" or "native"; None: the backend's default.
        kv_cache_dtype: Type of the KV caches: "fp8", which is E4M3, or "auto", the model's own.
        block_size: Rows per page of the KV caches; 0: linear caches.
        builder_optimization_level: How long TensorRT looks for fast kernels, 0…5.
        workspace: TensorRT's scratch memory, in MiB.
        prompt_chunk: The largest prefill chunk, in nodes; None: 512.
        timing_cache: A file that is read before and written after compiling.
        weight_streaming: Whether weights may stay on the host.
        version_compatible: Whether engines also run on later minor versions of TensorRT.
        hardware_compatible: On which other GPUs engines run too, a key of HARDWARE.
    """

    arch: tuple[str, ...] = ()
    attention: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 0
    builder_optimization_level: int | None = None
    workspace: int | None = None
    prompt_chunk: int | None = None
    timing_cache: Path | None = None
    weight_streaming: bool = False
    version_compatible: bool = False
    hardware_compatible: str | None = None

    def __post_init__(self) -> None:
        architectures(self.arch)
        if self.builder_optimization_level is not None and not 0 <= self.builder_optimization_level <= 5:
            raise OptionError(f"builder-optimization-level must be 0…5, not {self.builder_optimization_level}")
        if self.workspace is not None and not 1 <= self.workspace <= 1 << 22:
            raise OptionError(f"workspace must be 1…{1 << 22} MiB, not {self.workspace}")
        if self.prompt_chunk is not None and not 64 <= self.prompt_chunk <= 4096:
            raise OptionError(f"prompt-chunk must be 64…4096 nodes, not {self.prompt_chunk}")
        if self.block_size not in (0, *BLOCK_SIZES):
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise OptionError(f"block-size must be {sizes} rows, or 0 for linear caches, not {self.block_size}")
        choices = {"attention": ATTENTIONS, "kv_cache_dtype": KV_CACHE_DTYPES, "hardware_compatible": tuple(HARDWARE)}
        for each in fields(self):
            known, value = choices.get(each.name), getattr(self, each.name)
            if known and value not in (each.default, *known):
                raise OptionError(f"unknown --{_flag(each.name)} {shown(value)}: use {', '.join(known)}")

    @property
    def targets(self) -> tuple[str, ...]:
        """The names in `arch`, such as ("89",); () for portable engines."""
        return architectures(self.arch)

    def plugin(self, backend: Backend) -> bool:
        """Return whether the attention of this backend's engines is the plugin TreeAttention."""
        return backend.takes_plugins and self.attention != "native"

    def check(self, backend: Backend) -> None:
        """Raise OptionError for an option that this backend does not support, so that none is ignored."""
        caches = {"FP8": "--kv-cache-dtype fp8"} if self.kv_cache_dtype == "fp8" else {}
        caches |= {"paged": f"--block-size {self.block_size}"} if self.block_size else {}
        for kind, option in caches.items() if not (self.plugin(backend) and backend.compiles) else ():
            without = " without --attention native" if backend.takes_plugins and backend.compiles else ""
            raise OptionError(f"{kind} caches are the plugin's alone: use {_PLUGIN}{without}, or drop {option}")
        given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        of_engines = [name for name in given if name != "attention" or not backend.takes_plugins]
        if not backend.compiles and of_engines:
            raise OptionError(
                f"backend {backend.name} compiles no engine: drop --{_flag(of_engines[0])}, or use {_ENGINES}"
            )
        if self.arch and not backend.architectures:
            raise OptionError(f"{backend.name} compiles for the GPU it runs on: drop --arch, or use {_ARCH}")
        if self.attention == "plugin" and not backend.takes_plugins:
            raise OptionError(f"{backend.name} takes no plugins: drop --attention plugin, or use {_PLUGIN}")
        timed = [name for name in given if name in _TIMED]
        if timed and not backend.times_kernels:
            raise OptionError(f"{backend.name} has no --{_flag(timed[0])}: drop it, or use {_TIMES}")

    def check_types(self, backend: Backend, types: Collection[str]) -> None:
        """Raise OptionError for types that a target in `arch` lacks; TensorRT-RTX itself would say so after minutes."""
        if backend.architectures and not self.targets and "fp8" in types:
            raise OptionError("portable engines also run where there is no FP8: give --arch 89 or later, or use int8")
        for each, (first, instead) in _FIRST.items():
            lacking = [name for name in self.targets if int(name) < first]
            if each in types and lacking:
                raise OptionError(
                    f"sm_{lacking[0]} has no {each.upper()}: give --arch {first} or later, or use {instead}"
                )


def _having(what: str) -> str:
    """Return the options that select compiling backends with a property, joined by "or"."""
    return " or ".join(f"--backend {name}" for name in COMPILED if getattr(BACKENDS[name], what))


_ENGINES, _ARCH, _PLUGIN, _TIMES = map(_having, ("compiles", "architectures", "takes_plugins", "times_kernels"))


def _flag(name: str) -> str:
    return name.replace("_", "-")


def architectures(wanted: Sequence[str]) -> tuple[str, ...]:
    """Return TensorRT-RTX's targets, each once; () for "portable", all GPUs that it supports. Raises OptionError."""
    names = split_names(wanted, (*RTX_ARCHITECTURES, "portable"), "TensorRT-RTX has no sm_{}")
    if "portable" in names and len(set(names)) > 1:
        raise OptionError("an engine is portable or for named architectures, not both")
    return tuple(dict.fromkeys(name for name in names if name != "portable"))
