"""What a build is asked for, validated once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specbuild.builder import targets
from specbuild.runtime.bundle.backend import BACKENDS, DEFAULT, Backend
from specbuild.runtime.errors import OptionError, OutputError
from specbuild.runtime.speculation.tree import TreeSpec

from .engine_options import EngineOptions
from .quantize_options import AUTO, AUTO_KL, MAX_KL, SELF, QuantizeOptions, chooses
from .scheme import Scheme, parse

BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # node counts, root included; the largest also bounds a chunk of a prompt
MAX_BATCH_SIZE = 64
LONGEST_DEFAULT = 4096  # max_seq_len where the models would take more and nothing was asked for
DEFAULT_TREE = "best:5"  # six nodes: on a CPU the most that cost little more than one


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """One build. `target` and `draft`: a folder or a hub id; `max_seq_len` None: what both take, at most 4096.

    `draft` "self:PRECISION": the target's own weights. `precision`: a scheme as `config.scheme.parse` reads it, or
    "auto"; None: the backend's first; `draft_precision` None: the target's. `cuda_arch`: what to compile kernels
    for, as `kernels.architectures` takes it, or "none". `engine`: how engines are compiled.
    `tune`: it is tuned here, as by `specbuild tune`, where it runs on a CPU.
    """

    target: str
    output: Path
    draft: str | None = None
    backend: str = DEFAULT
    precision: str | None = None
    draft_precision: str | None = None
    max_seq_len: int | None = None
    max_batch_size: int = 4
    buckets: tuple[int, ...] = BUCKETS
    tree: str = DEFAULT_TREE
    cuda_arch: tuple[str, ...] = ()
    engine: EngineOptions = field(default_factory=EngineOptions)
    quantize: QuantizeOptions = field(default_factory=QuantizeOptions)
    tune: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        """Raises OptionError and OutputError."""
        if self.backend not in BACKENDS:
            raise OptionError(f"unknown backend {self.backend!r}: use {', '.join(BACKENDS)}")
        self._check_precisions()
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise OptionError(f"max-seq-len must be at least 2, not {self.max_seq_len}")
        if not 1 <= self.max_batch_size <= MAX_BATCH_SIZE:
            raise OptionError(f"max-batch-size must be 1…{MAX_BATCH_SIZE}, not {self.max_batch_size}")
        if list(self.buckets) != sorted({1, *self.buckets}) or self.buckets[-1] > BUCKETS[-1]:
            raise OptionError(f"buckets must go up from 1 to at most {BUCKETS[-1]}, not {self.buckets}")
        if self.draft and self.descriptor.on_gpu and 2 not in self.buckets:
            raise OptionError("a draft on a GPU runs two nodes at a time: give a bucket of 2")
        TreeSpec.parse(self.tree).check(self.buckets[-1])
        if self.cuda_arch != ("none",):
            targets.architectures(self.cuda_arch)
        self.engine.check(self.descriptor)
        if self.plugin and "fp32" in map(self.dtype_of, self.models):
            linear = self.engine.kv_cache_dtype == "auto" and not self.engine.block_size
            native = ", or --attention native" if linear else ""
            raise OptionError(f"TreeAttention computes in 16 bits: use fp16 or bf16{native}")
        if self.tune and self.descriptor.on_gpu:
            raise OptionError(
                f"{self.backend} bundles are tuned where they run: drop --tune, and run specbuild tune there"
            )
        if self.output.name in ("", ".", ".."):
            raise OutputError(f"{self.output} cannot be a bundle's name: give a folder to create")

    def _check_precisions(self) -> None:
        for name in ("target", "draft"):
            self.scheme_of(name)
        if self.draft_precision and not self.draft:
            raise OptionError("--draft-precision needs a draft: give one with --draft, or drop it")
        if self.own_draft and self.draft_precision:
            raise OptionError(f"--draft {self.draft} says its precision: drop --draft-precision")
        target, draft = self.scheme_of("target"), self.scheme_of("draft")
        if self.own_draft and target and draft and draft.bits >= target.bits:
            raise OptionError(f"--draft {self.draft} is no smaller than the target: use self:int4")
        self.quantize.check(self.quantizes, target is None or target.quantized or bool(self.quantize.all_types))
        self.engine.check_types(self.descriptor, self.types)

    @property
    def descriptor(self) -> Backend:
        """The descriptor of the backend, which says what it does otherwise than the others."""
        return BACKENDS[self.backend]

    @property
    def plugin(self) -> bool:
        """Whether its engines attend by the plugin TreeAttention."""
        return self.engine.plugin(self.descriptor)

    @property
    def models(self) -> tuple[str, ...]:
        """Target and, where there is one, draft."""
        return ("target", "draft") if self.draft else ("target",)

    @property
    def quantizes(self) -> bool:
        """Whether any weight is to be quantized."""
        schemes = [self.scheme_of(name) for name in self.models]
        schemes += [parse(scheme, self.backend) for scheme in self.quantize.all_types]
        return any(scheme is None or scheme.quantized for scheme in schemes)

    @property
    def types(self) -> set[str]:
        """Types that weights may have, and what else is computed in: "int4", "fp16"."""
        schemes = [*map(self.scheme_of, self.models), *(parse(each, self.backend) for each in self.quantize.all_types)]
        narrow = {scheme.kind if scheme else "int4" for scheme in schemes}  # auto may choose that
        return narrow | set(map(self.dtype_of, self.models))

    @property
    def fp8(self) -> bool:
        """Whether any weight is to be in FP8."""
        return "fp8" in self.types

    @property
    def max_kl(self) -> float:
        """Nats a token that a quantized target may move, and what "auto" spends."""
        return self.quantize.max_kl or (AUTO_KL if chooses(self.precision_of("target")) else MAX_KL)

    @property
    def own_draft(self) -> bool:
        """Whether the draft is the target's own weights."""
        return bool(self.draft) and str(self.draft).startswith(SELF)

    def precision_of(self, model: str) -> str:
        """The precision of "target" or "draft" as it was asked for."""
        asked = self.draft_precision if model == "draft" else None
        if model == "draft" and self.own_draft:
            asked = str(self.draft).removeprefix(SELF)
        asked = asked or self.precision or self.descriptor.precisions[0]
        return asked.lower() if asked.lower().startswith("best:") else asked

    def scheme_of(self, model: str) -> Scheme | None:
        """The scheme of a model's weights, of which some may have another; None for "auto". Raises OptionError."""
        precision = self.precision_of(model)
        if chooses(precision) and self.descriptor.quantizes:
            if precision != AUTO and self.descriptor.on_gpu:
                raise OptionError(f"{precision} times steps here, those of {self.backend} run elsewhere: use auto")
            if precision != AUTO and model == "draft" and (self.draft_precision or self.own_draft):
                instead = "--draft self:int4" if self.own_draft else "--draft-precision auto"
                raise OptionError(f"{precision} is for the target: give {instead}")
            return None
        return parse(precision, self.backend)

    def dtype_of(self, model: str) -> str:
        """What a model computes in where it is not quantized: fp32, fp16 or bf16."""
        scheme = self.scheme_of(model)
        return scheme.dtype if scheme else self.descriptor.dtypes[0]

    @property
    def architectures(self) -> tuple[str, ...]:
        """What kernels are compiled for, "90": as asked, else for the GPUs that the backend's graphs run on."""
        if self.cuda_arch:
            return () if self.cuda_arch == ("none",) else targets.architectures(self.cuda_arch)
        if not self.engine.targets:
            return self.descriptor.cubins
        return tuple(name for name in self.engine.targets if name in targets.ARCHITECTURES)

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes compiled: powers of two below the maximum, and the maximum."""
        sizes = [1 << bit for bit in range(self.max_batch_size.bit_length())]
        return sorted({size for size in sizes if size < self.max_batch_size} | {self.max_batch_size})
