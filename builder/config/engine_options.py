"""How engines are compiled: what `specbuild build` offers of TensorRT's own options."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from specbuild.builder.targets import split_names
from specbuild.runtime.backends.gpu.plan import BLOCK_SIZES
from specbuild.runtime.bundle.backend import BACKENDS, COMPILED, RTX_ARCHITECTURES, Backend
from specbuild.runtime.errors import OptionError, shown

HARDWARE = {"ampere-plus": "AMPERE_PLUS", "same-compute-capability": "SAME_COMPUTE_CAPABILITY"}
ATTENTIONS = ("plugin", "native")
KV_CACHE_DTYPES = ("auto", "fp8")
FP8_FROM = 89  # the first architecture with products in E4M3
_FIRST = {"fp8": (FP8_FROM, "int8"), "int4": (80, "int8"), "bf16": (80, "fp16")}  # that has a type; what to use instead
_TIMED = ("timing_cache", "version_compatible", "hardware_compatible")  # only of the flavour that times kernels


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How engines are compiled; by default as TensorRT does. `workspace` in MiB; `attention` None: the backend's own.

    `arch`: TensorRT-RTX's targets, as `architectures` takes them. `prompt_chunk`: nodes of a prompt in a step, at most;
    None: 512. `kv_cache_dtype`: "fp8", E4M3, or "auto", the model's own type. `block_size`: rows of a page of the
    caches; 0: they are linear. Raises OptionError.
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
        """`arch` one by one, ("89",); () is portable."""
        return architectures(self.arch)

    def plugin(self, backend: Backend) -> bool:
        """Whether engines of this backend attend by the plugin TreeAttention."""
        return backend.takes_plugins and self.attention != "native"

    def check(self, backend: Backend) -> None:
        """Raises OptionError for what this backend has not: nothing is ignored."""
        caches = {"FP8": "--kv-cache-dtype fp8"} if self.kv_cache_dtype == "fp8" else {}
        caches |= {"paged": f"--block-size {self.block_size}"} if self.block_size else {}
        for kind, option in caches.items() if not self.plugin(backend) else ():
            without = " without --attention native" if backend.takes_plugins else ""
            raise OptionError(f"{kind} caches are the plugin's alone: use {_PLUGIN}{without}, or drop {option}")
        given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if not backend.compiles and given:
            raise OptionError(f"backend {backend.name} compiles no engine: drop --{_flag(given[0])}, or use {_ENGINES}")
        if self.arch and not backend.architectures:
            raise OptionError(f"{backend.name} compiles for the GPU it runs on: drop --arch, or use {_ARCH}")
        if self.attention == "plugin" and not backend.takes_plugins:
            raise OptionError(f"{backend.name} takes no plugins: drop --attention plugin, or use {_PLUGIN}")
        timed = [name for name in given if name in _TIMED]
        if timed and not backend.times_kernels:
            raise OptionError(f"{backend.name} has no --{_flag(timed[0])}: drop it, or use {_TIMES}")

    def check_types(self, backend: Backend, types: Collection[str]) -> None:
        """Raises OptionError for types that what `arch` says has not: TensorRT-RTX itself says so after minutes."""
        if backend.architectures and not self.targets and "fp8" in types:
            raise OptionError("portable engines also run where there is no FP8: give --arch 89 or later, or use int8")
        for each, (first, instead) in _FIRST.items():
            lacking = [name for name in self.targets if int(name) < first]
            if each in types and lacking:
                raise OptionError(
                    f"sm_{lacking[0]} has no {each.upper()}: give --arch {first} or later, or use {instead}"
                )


def _having(what: str) -> str:
    """The options that ask for a compiling backend with a property."""
    return " or ".join(f"--backend {name}" for name in COMPILED if getattr(BACKENDS[name], what))


_ENGINES, _ARCH, _PLUGIN, _TIMES = map(_having, ("compiles", "architectures", "takes_plugins", "times_kernels"))


def _flag(name: str) -> str:
    return name.replace("_", "-")


def architectures(wanted: Sequence[str]) -> tuple[str, ...]:
    """TensorRT-RTX's targets, each once; () is portable, for whatever it supports. Raises OptionError."""
    names = split_names(wanted, (*RTX_ARCHITECTURES, "portable"), "TensorRT-RTX has no sm_{}")
    if "portable" in names and len(set(names)) > 1:
        raise OptionError("an engine is portable or for named architectures, not both")
    return tuple(dict.fromkeys(name for name in names if name != "portable"))
