"""The options of a build, validated when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specbuild.builder import targets
from specbuild.runtime.bundle.backend import BACKENDS, DEFAULT, Backend
from specbuild.runtime.errors import OptionError, OutputError
from specbuild.runtime.speculation.tree import TreeSpec

from .engine_options import EngineOptions
from .quantize_options import AUTO, AUTO_KL, MAX_KL, NO_DRAFT, SELF, QuantizeOptions, chooses
from .scheme import KEEP, Scheme, parse

BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # node counts, root included; the largest also bounds a prefill chunk
MAX_BATCH_SIZE = 64
CHECK_SLOTS = 2  # sequences at once in a CPU's check: enough to see that they do not mix, and caches are large
LONGEST_DEFAULT = 4096  # default of max_seq_len for models that support more
DEFAULT_TREE = "best:5"  # six nodes with the root: on a CPU the largest step that costs little more than one node


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """The options of one build.

    Attributes:
        target: A folder, a GGUF file or a hub id.
        output: The bundle's folder.
        draft: As `target`, an EAGLE-3 head, "mtp" for the target's MTP layer, "self:PRECISION" for its own weights, or
            "none"; None: the MTP layer if there is one and the backend is a CPU, else none.
        backend: The name of the backend.
        precision: A scheme as `scheme.parse` reads it, "auto", or "best:…"; None: "keep" for a GGUF file on a CPU, else
            the backend's first.
        draft_precision: The draft's precision; None: the target's, where that is given.
        draft_vocab_size: How many tokens a draft model's head has at most, the most frequent ones; None: 65,536.
        max_seq_len: The longest text, in tokens; None: what both models support, at most 4096.
        max_batch_size: How many sequences a step has at most.
        buckets: Node counts that steps may have, root included, ascending.
        tree: The tree that speculation uses by default.
        cuda_arch: What to compile kernels for, as `targets.architectures` reads it, or "none".
        engine: How engines are compiled.
        quantize: How weights are quantized.
        tune: Tune the bundle on this machine as `specbuild tune` does; only for a CPU.
        force: Replace an existing bundle.
        adapter: A LoRA adapter's folder or hub id, which is merged into the target; None: none.
        draft_adapter: The draft's.
    """

    target: str
    output: Path
    draft: str | None = None
    backend: str = DEFAULT
    precision: str | None = None
    draft_precision: str | None = None
    draft_vocab_size: int | None = None
    max_seq_len: int | None = None
    max_batch_size: int = 4
    buckets: tuple[int, ...] = BUCKETS
    tree: str = DEFAULT_TREE
    cuda_arch: tuple[str, ...] = ()
    engine: EngineOptions = field(default_factory=EngineOptions)
    quantize: QuantizeOptions = field(default_factory=QuantizeOptions)
    tune: bool = False
    force: bool = False
    adapter: str | None = None
    draft_adapter: str | None = None

    def __post_init__(self) -> None:
        """Check the options; raise OptionError or OutputError."""
        if self.backend not in BACKENDS:
            raise OptionError(f"unknown backend {self.backend!r}: use {', '.join(BACKENDS)}")
        self._check_precisions()
        self.check_draft_model(self.drafts and not self.own_draft)
        if self.max_seq_len is not None and self.max_seq_len < 2:
            raise OptionError(f"max-seq-len must be at least 2, not {self.max_seq_len}")
        if not 1 <= self.max_batch_size <= MAX_BATCH_SIZE:
            raise OptionError(f"max-batch-size must be 1…{MAX_BATCH_SIZE}, not {self.max_batch_size}")
        if list(self.buckets) != sorted({1, *self.buckets}) or self.buckets[-1] > BUCKETS[-1]:
            raise OptionError(f"buckets must go up from 1 to at most {BUCKETS[-1]}, not {self.buckets}")
        if self.drafts and self.descriptor.on_gpu and 2 not in self.buckets:
            raise OptionError("a draft on a GPU runs two nodes at a time: give a bucket of 2")
        TreeSpec.parse(self.tree).check(self.buckets[-1])
        if self.cuda_arch != ("none",):
            targets.architectures(self.cuda_arch)
        self.engine.check(self.descriptor)
        self._check_kernels()
        if self.tune and self.descriptor.on_gpu:
            raise OptionError(
                f"{self.backend} bundles are tuned where they run: drop --tune, and run specbuild tune there"
            )
        if self.output.name in ("", ".", ".."):
            raise OutputError(f"{self.output} cannot be a bundle's name: give a folder to create")

    def _check_kernels(self) -> None:
        """Raise OptionError where specbuild's own kernels on a GPU do not compute what is asked."""
        if self.plugin and "fp32" in map(self.dtype_of, self.models):
            linear = self.engine.kv_cache_dtype == "auto" and not self.engine.block_size
            native = ", or --attention native" if linear else ""
            raise OptionError(f"TreeAttention computes in 16 bits: use fp16 or bf16{native}")
        in_blocks = self.descriptor.blocks and (self.quantizes or any(map(self.keeps, self.models)))
        if in_blocks and self.descriptor.on_gpu and not self.plugin:
            raise OptionError(
                "weights in blocks are multiplied beside TreeAttention, in 16 bits: drop --attention native and fp32, "
                "or give --precision fp16"
            )

    def _check_precisions(self) -> None:
        for name in ("target", "draft"):
            self.scheme_of(name)
        if self.draft_precision and not self.drafts:
            raise OptionError("--draft-precision needs a draft: give one with --draft, or drop it")
        if self.own_draft and self.draft_precision:
            raise OptionError(f"--draft {self.draft} says its precision: drop --draft-precision")
        target, draft = self.scheme_of("target"), self.scheme_of("draft")
        if self.own_draft and target and draft and draft.bits >= target.bits:
            raise OptionError(f"--draft {self.draft} is no smaller than the target: use self:int4")
        kept = any(parse(scheme, self.backend).kind == KEEP for scheme in self.quantize.all_types)
        if kept or any(self.keeps(name) and self.quantize.types_of(name) for name in self.models):
            raise OptionError(
                "keep is for all weights of a model: drop --tensor-type and the like, or give --precision"
            )
        narrow = target is None or target.quantized or bool(self.quantize.types_of("target"))
        self.quantize.check(self.quantizes, narrow)
        self.engine.check_types(self.descriptor, self.types)

    def check_draft_model(self, exists: bool) -> None:
        """Raise OptionError for a wrong option of a draft model of its own, or one without such a model."""
        options = {"--draft-adapter": self.draft_adapter, "--draft-vocab-size": self.draft_vocab_size}
        for option, value in options.items():
            if value not in (None, "") and not exists:
                raise OptionError(f"{option} is for a draft model of its own: give one with --draft, or drop it")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise OptionError(f"draft-vocab-size must be at least 1, not {self.draft_vocab_size}")

    @property
    def descriptor(self) -> Backend:
        """The backend's descriptor, which says how it differs from other backends."""
        return BACKENDS[self.backend]

    @property
    def plugin(self) -> bool:
        """Return whether attention is TreeAttention; by default graphs, not engines, in fp32 have the standard one."""
        falls_back = self.engine.attention is None and not self.descriptor.compiles
        return self.engine.plugin(self.descriptor) and not (falls_back and "fp32" in map(self.dtype_of, self.models))

    @property
    def models(self) -> tuple[str, ...]:
        """The models' names: "target" and, if there is one, "draft"."""
        return ("target", "draft") if self.drafts else ("target",)

    @property
    def quantizes(self) -> bool:
        """Return whether any weight is quantized, or may be by "auto" and "best"."""
        schemes = [self.scheme_of(name) for name in self.models]
        schemes += [parse(scheme, self.backend) for scheme in self.quantize.all_types]
        return any(scheme is None or scheme.quantized for scheme in schemes)

    @property
    def types(self) -> set[str]:
        """The types that weights may have, and those that the rest is computed in, such as "int4" and "fp16"."""
        schemes = [*map(self.scheme_of, self.models), *(parse(each, self.backend) for each in self.quantize.all_types)]
        narrow = {scheme.kind if scheme else "int4" for scheme in schemes}  # auto may choose int4
        return narrow | set(map(self.dtype_of, self.models))

    @property
    def fp8(self) -> bool:
        """Return whether any weight is to be in FP8."""
        return "fp8" in self.types

    @property
    def max_kl(self) -> float:
        """The largest KL divergence of a quantized target, in nats per token; "auto" and "best" spend up to it."""
        return self.quantize.max_kl or (AUTO_KL if chooses(self.precision_of("target")) else MAX_KL)

    @property
    def drafts(self) -> bool:
        """Return whether the options name a draft."""
        return self.draft not in (None, "", NO_DRAFT)

    @property
    def own_draft(self) -> bool:
        """Return whether the draft is the target's own weights."""
        return bool(self.draft) and str(self.draft).startswith(SELF)

    def precision_of(self, model: str) -> str:
        """Return the precision that was requested for "target" or "draft"."""
        asked = self.draft_precision if model == "draft" else None
        if model == "draft" and self.own_draft:
            asked = str(self.draft).removeprefix(SELF)
        asked = asked or self.precision or self._default(model)
        return asked.lower() if asked.lower().startswith("best:") else asked

    def _default(self, model: str) -> str:
        """Return the precision of a model that none was given for."""
        source, adapter = (self.target, self.adapter) if model == "target" else (str(self.draft), self.draft_adapter)
        keeps = KEEP in self.descriptor.precisions and not self.quantize.types_of(model) and not adapter
        return KEEP if keeps and Path(source).expanduser().is_file() else self.descriptor.precisions[0]

    def keeps(self, model: str) -> bool:
        """Return whether a model keeps the blocks of its GGUF file."""
        return self.precision_of(model).partition(":")[0] == KEEP

    def scheme_of(self, model: str) -> Scheme | None:
        """Return the scheme of a model's weights, None for "auto" and "best"; raise OptionError for a wrong one.

        `quantize` may give single weights another scheme.
        """
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
        """Return the type that a model computes in where it is not quantized: fp32, fp16 or bf16."""
        scheme = self.scheme_of(model)
        return scheme.dtype if scheme else self.descriptor.dtypes[0]

    @property
    def architectures(self) -> tuple[str, ...]:
        """GPU architectures to compile kernels for, such as "90": as requested, else those of the engines or graphs."""
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
