"""Inspects the checkpoints of a build before any weights are loaded, so that what cannot work fails in seconds."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from specbuild.builder.quantize.assignment import assign, check_patterns
from specbuild.runtime.backends.cpu.operators import operators
from specbuild.runtime.bundle.atomic_output import check_output
from specbuild.runtime.errors import OptionError

from .check.bundle_check import SLOTS
from .codegen import nvrtc
from .codegen.tensorrt import capacity_of, profiles_of
from .config.build_config import LONGEST_DEFAULT, BuildConfig
from .config.scheme import KEEP
from .frontend import checkpoint as checkpoints
from .frontend.attention_layout import Layout, empty, probe
from .frontend.checkpoint import Checkpoint
from .frontend.eagle3_head import EagleCheckpoint, find_head, is_eagle
from .frontend.gguf import Gguf
from .frontend.quiet import quiet
from .frontend.vocabulary import Vocabulary, reconcile
from .quantize.linears import Names
from .quantize.own_blocks import stored_bytes

CUBINS_BYTES = 2 << 20  # per architecture, at most
PROFILE_BYTES = 6 << 20  # of code per profile of an engine
# Measured memory of a build that has the larger model in memory: a constant, plus bytes per parameter of it.
BASE_BYTES = {False: 600 << 20, True: 950 << 20}  # by whether engines are compiled
PARAMETER_BYTES = {"engines": 11, "quantized": 19, "plain": 18}
GRAPH_BYTES = 4  # per parameter in TMPDIR, where a graph is written in float32 to be timed or checked
# Measured of a build that reads weights as it writes them: bytes per number of the largest weight while it is packed,
# in blocks and in float32, and copies of the logits of the check, whose texts are this long together.
WORK_BYTES = {True: 5, False: 14}
TEXT_LOGITS, CHECK_TOKENS = 2, 280
LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


@dataclass(frozen=True)
class Sources:
    """The checkpoints of a build, the layouts of their attention, and the disk space and memory that it takes."""

    target: Checkpoint
    draft: Checkpoint | None
    head: EagleCheckpoint | None  # in place of a draft
    vocabulary: Vocabulary | None  # how the draft's tokens map to the target's
    max_seq_len: int
    layouts: dict[str, Layout]
    shapes: list[nvrtc.Shape]  # of TreeAttention's kernels, if they are compiled
    bundle_bytes: int  # upper bound of the bundle's size
    memory_bytes: int  # estimated peak memory of the build
    scratch_bytes: int = 0  # that it writes to TMPDIR at most

    @property
    def models(self) -> dict[str, Checkpoint | EagleCheckpoint]:
        """The target and, if there is one, the draft or head, by name."""
        draft = self.draft or self.head
        return {"target": self.target} | ({"draft": draft} if draft else {})

    @property
    def origins(self) -> dict[str, dict[str, Any]]:
        """The source of each model, and how a GGUF file or a packed checkpoint had quantized it."""
        origins = {name: model.origin for name, model in self.models.items() if isinstance(model, Checkpoint)}
        told = {name: origin.to_dict() for name, origin in origins.items() if origin}
        return {name: {"source": model.source} | told.get(name, {}) for name, model in self.models.items()}

    @property
    def kind(self) -> str:
        """The kind of draft as in the manifest: "model", "parallel" or "eagle3"."""
        if self.head:
            return "eagle3"
        parallel = self.vocabulary is not None and self.vocabulary.mask_token is not None
        return "parallel" if parallel else "model"

    @property
    def shares_weights(self) -> bool:
        """Return whether the draft shares tensors with the target: all of them, or for a head the embedding."""
        return self.head is not None or self.draft is self.target

    def check_memory(self) -> int:
        """Return `memory_bytes`; raise OptionError if there is less memory, or less room in TMPDIR than is needed."""
        present = memory_limit()
        if self.memory_bytes > present:
            raise OptionError(
                f"the build takes about {self.memory_bytes >> 20} MiB of memory, this machine has {present >> 20} MiB: "
                "build on a larger one"
            )
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if self.scratch_bytes > free:
            raise OptionError(
                f"the build writes {self.scratch_bytes >> 20} MiB to {tempfile.gettempdir()}, which has {free >> 20} "
                "MiB free: set TMPDIR to another disk"
            )
        return self.memory_bytes


def prepare(config: BuildConfig) -> Sources:
    """Find and inspect the checkpoints of a build.

    Raises:
        CheckpointError: A checkpoint cannot be used.
        OptionError: The options do not fit the checkpoints.
        ExecutionError: The backend cannot run here, though its bundles are checked when they are built.
    """
    if not config.descriptor.on_gpu:
        operators()
    target, draft, head, vocabulary = checkpoints.find(config.target), None, None, None
    if config.own_draft:
        draft = target
    elif config.draft and is_eagle(checkpoints.read_config(config.draft)):
        head = find_head(config.draft, target)
        _check_head_types(config)
    elif config.draft:
        draft = checkpoints.find(config.draft)
        vocabulary = reconcile(target, draft)
    _check_kept(config, {"target": target, "draft": draft or head})
    max_seq_len = _max_seq_len(config, target, draft or head)
    models = {"target": target} | ({"draft": draft} if draft else {})
    layouts = {name: probe(checkpoint.config, max_seq_len) for name, checkpoint in models.items()}
    if head:
        layouts["draft"] = Layout(head.config.num_key_value_heads, head.config.head_dim, (0,))
    names = {name: Names.of(empty(checkpoint.config)[1]) for name, checkpoint in models.items()}
    calibrated = False
    check_patterns(config.quantize, names, config.backend)
    for name, each in names.items():
        asked = assign(config.quantize, name, config.precision_of(name), config.backend, each).values()
        calibrated = calibrated or config.scheme_of(name) is None or any(scheme.calibrated for scheme in asked)
    if config.quantize.calibration_cache and not calibrated:
        raise OptionError("these precisions are not calibrated, there is nothing to keep: drop --calibration-cache")
    for name, layout in layouts.items():
        _check_head(config, name, layout.head_dim)
    # No engine brings its own attention.
    alone = config.architectures and (config.plugin or not config.descriptor.on_gpu) and not config.descriptor.compiles
    sources = models | ({"draft": head} if head else {})
    shapes = [_shape(config, name, sources[name], layout) for name, layout in layouts.items()] if alone else []
    code = PROFILE_BYTES * (len(config.buckets) + 1) * len(models) if config.descriptor.compiles else 0
    weights = {name: _stored(config, name, model) for name, model in sources.items()}
    rows = capacity_of(config, max_seq_len)
    memory = [_memory(config, name, each, weights[name], layouts[name], rows) for name, each in sources.items()]
    return Sources(
        target=target,
        draft=draft,
        head=head,
        vocabulary=vocabulary,
        max_seq_len=max_seq_len,
        layouts=layouts,
        shapes=shapes,
        bundle_bytes=sum(weights.values()) + (8 << 20) + CUBINS_BYTES * len(config.architectures) + code,
        memory_bytes=max(memory),
        scratch_bytes=GRAPH_BYTES * max(each.parameters * needs_whole(config, n) for n, each in sources.items()),
    )


def needs_whole(config: BuildConfig, name: str) -> bool:
    """Return whether a model has to lie in memory as a whole: to be calibrated, or to be compared for a GPU."""
    scheme = config.scheme_of(name)
    return config.descriptor.on_gpu or scheme is None or scheme.quantized or bool(config.quantize.all_types)


def memory_limit() -> int:
    """Return this machine's memory in bytes, or what this process's control group may use of it."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, LIMITS):
        text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
        found += [int(text)] if text.isdigit() else []  # "max": no limit
    return min(found)


def _stored(config: BuildConfig, name: str, model: Checkpoint | EagleCheckpoint) -> int:
    """Return how many bytes a model's weights take in the bundle at most, with padding."""
    if config.precision_of(name) == KEEP and isinstance(model, Checkpoint) and model.tensors:
        return sum(stored_bytes(weight) for weight in model.tensors.values()) * 33 // 32
    return 4 * model.parameters * 33 // 32


def _memory(
    config: BuildConfig, name: str, model: Checkpoint | EagleCheckpoint, weights: int, layout: Layout, rows: int
) -> int:
    """Return the memory that it takes to build a model and, of a target, to check its bundle."""
    engines = config.descriptor.compiles
    tensors = model.tensors if isinstance(model, Checkpoint) else None
    if needs_whole(config, name) or tensors is None:
        graphs = "quantized" if config.quantizes else "plain"
        return BASE_BYTES[engines] + PARAMETER_BYTES["engines" if engines else graphs] * model.parameters
    kept = config.precision_of(name) == KEEP
    writes = max(WORK_BYTES[kept and bool(each.format)] * prod(each.shape) for each in tensors.values())
    caches = SLOTS * 2 * layout.layers * layout.kv_heads * layout.head_dim * rows * 4
    checks = weights + caches + TEXT_LOGITS * CHECK_TOKENS * model.config.vocab_size * 4
    return int(BASE_BYTES[engines] + max(writes, checks))


def _check_kept(config: BuildConfig, models: Mapping[str, Checkpoint | EagleCheckpoint | None]) -> None:
    """Raise OptionError if a model that has no blocks of its own is to keep them."""
    for name, model in models.items():
        if model and config.precision_of(name) == KEEP and not isinstance(getattr(model, "origin", None), Gguf):
            option = "--precision" if name == "target" else "--draft-precision"
            raise OptionError(f"keep is for a GGUF file, and {model.source} is none: give another {option}")


def _check_head_types(config: BuildConfig) -> None:
    """Raise OptionError for quantization or FP8 caches, which EAGLE-3 heads do not support yet."""
    scheme = config.scheme_of("draft")
    if scheme is None or scheme.quantized:
        raise OptionError("an EAGLE-3 head is not quantized yet: give --draft-precision fp32, or on a GPU fp16")
    if config.engine.kv_cache_dtype == "fp8":
        raise OptionError("an EAGLE-3 head is not calibrated for FP8 caches yet: give --kv-cache-dtype auto")


def _check_head(config: BuildConfig, name: str, size: int) -> None:
    """Raise OptionError for a head size that the backend's attention does not support."""
    if config.plugin:
        try:
            nvrtc.Shape(size, "F16", "F16")
        except OptionError as error:
            raise OptionError(f"the {name} has no plugin, {error}: use --attention native") from None
    elif config.descriptor.compiles and config.dtype_of(name) != "fp32" and size % 8:
        raise OptionError(
            f"the {name} has heads of {size}, TensorRT's attention in 16 bits takes multiples of 8: use fp32"
        )


@quiet()
def dry_run(config: BuildConfig) -> dict[str, Any]:
    """Return what `build` would make, as JSON; needs neither a GPU nor a compiler.

    Raises the errors that `build` raises for its output, options, checkpoints and memory before it begins.
    """
    check_output(config.output, config.force)
    sources = prepare(config)
    sources.check_memory()
    profiles = profiles_of(config, sources.max_seq_len) if config.descriptor.compiles else []
    shown = ["batch", "nodes", "logit_nodes", *(["tree"] if config.plugin else [])]
    shown += ["pages"] if config.engine.block_size else []
    return {
        "backend": config.backend,
        "models": {
            name: {
                **sources.origins[name],
                "architecture": model.architecture,
                "precision": config.precision_of(name),
                "layers": sources.layouts[name].layers,
            }
            for name, model in sources.models.items()
        },
        "kv_cache_dtype": config.engine.kv_cache_dtype,
        "block_size": config.engine.block_size,
        "max_seq_len": sources.max_seq_len,
        "max_batch_size": config.max_batch_size,
        "buckets": list(config.buckets),
        "engine_architectures": list(config.engine.targets),
        "kernel_architectures": list(config.architectures),
        "profiles": {p.name: {d: list(sizes) for d, sizes in p.sizes.items() if d in shown} for p in profiles},
        "bundle_bytes_at_most": sources.bundle_bytes,
        "build_memory_bytes": sources.memory_bytes,
        "build_scratch_bytes": sources.scratch_bytes,
    }


def _shape(config: BuildConfig, name: str, checkpoint: Checkpoint | EagleCheckpoint, layout: Layout) -> nvrtc.Shape:
    """Return the shape that TreeAttention is compiled for: of the type that the bundle computes in.

    Where a bundle does not use it, float16 stays, and other types are bfloat16. The cache has the same type. Raises
    OptionError for a head size that the kernels do not support.
    """
    computed = config.dtype_of(name) if config.plugin else checkpoint.config.dtype
    dtype = "F16" if computed in ("fp16", torch.float16) else "BF16"
    try:
        return nvrtc.Shape(layout.head_dim, dtype, dtype)
    except OptionError as error:
        raise OptionError(f"the {name} has no kernels, {error}: build it without --cuda-arch") from None


def _max_seq_len(config: BuildConfig, target: Checkpoint, draft: Checkpoint | EagleCheckpoint | None) -> int:
    """Return the requested length, by default the longest that both models support, at most LONGEST_DEFAULT.

    Raises OptionError if a model does not support the requested length.
    """
    for name, checkpoint in (("target", target), ("draft", draft)):
        if checkpoint and config.max_seq_len and config.max_seq_len > checkpoint.max_positions:
            raise OptionError(
                f"max-seq-len {config.max_seq_len} is beyond the {name}'s {checkpoint.max_positions} positions"
            )
    longest = min(c.max_positions for c in (target, draft) if c)
    return config.max_seq_len or min(longest, LONGEST_DEFAULT)
