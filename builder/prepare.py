"""Inspects the checkpoints of a build before any weights are loaded, so that what cannot work fails in seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specbuild.builder.quantize.assignment import assign, check_patterns, experts_scheme
from specbuild.runtime.bundle.backend import DEFAULT
from specbuild.runtime.bundle.memory_plan import item_bytes
from specbuild.runtime.errors import OptionError

from .build_memory import BASE_BYTES, CHECK_TOKENS, building_memory, held_out_tokens
from .codegen import nvrtc
from .codegen.tensorrt import capacity_of
from .config.build_config import CHECK_SLOTS, LONGEST_DEFAULT, BuildConfig
from .config.quantize_options import AUTO, MTP, chooses
from .config.scheme import Scheme
from .frontend import checkpoint as checkpoints
from .frontend.attention_layout import Layout, empty, probe
from .frontend.checkpoint import Checkpoint
from .frontend.draft_head import HeadCheckpoint
from .frontend.eagle3_head import EagleCheckpoint, find_head, is_eagle
from .frontend.gguf import Gguf
from .frontend.lazy_weights import of_model
from .frontend.mtp_head import find_mtp
from .frontend.vocabulary import MAX_DRAFTED, Vocabulary, fit, reconcile
from .frontend.weights import has_mtp, read_header, weight_files
from .quantize.linears import Names
from .quantize.own_blocks import own_blocks
from .quantize.quality import MAX_LOGITS
from .quantize.stage import RUNGS
from .quantize.weight_sizes import saved_bytes, weight_bytes

TEXT_BYTES = 8 << 20  # of tokenizer, graphs and report
CUBINS_BYTES = 2 << 20  # per architecture, at most
PROFILE_BYTES = 6 << 20  # of code per profile of an engine
LOGITS_FILES = 3  # of a text at once: a target's, and a draft's before and after
CANDIDATE_BYTES = 6  # per parameter in TMPDIR, where the candidates of `best` are timed: float32, INT8 and INT4
MAPPED = "the bundle, mapped, in its check"  # read from disk again where memory is less
LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"


@dataclass(frozen=True, slots=True)
class Needs:
    """The bytes that a build takes for one model.

    Attributes:
        weights: Its weights in the bundle.
        scratch: Room in TMPDIR.
        calibration: Room beside the bundle for what is calibrated, until the build is done.
        uses: Memory at the peak, by its use.
        required: Memory without which nothing is built: all but files that are mapped.
    """

    weights: int
    scratch: int
    calibration: int
    uses: dict[str, int]
    required: int

    @property
    def memory(self) -> int:
        """The memory of all uses, which is the build's peak."""
        return sum(self.uses.values())


@dataclass(frozen=True, slots=True)
class WeightShapes:
    """The names of a model's weights that can be quantized, and the shape of each of its weights."""

    names: Names
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sources:
    """The checkpoints of a build, the layouts of their attention, and the disk space and memory that it takes."""

    target: Checkpoint
    draft: Checkpoint | None
    head: HeadCheckpoint | None  # in place of a draft
    vocabulary: Vocabulary | None  # how the draft's tokens map to the target's
    max_seq_len: int
    layouts: dict[str, Layout]
    weights: dict[str, WeightShapes]  # of each model but a head
    shapes: list[nvrtc.Shape]  # of TreeAttention's kernels, if they are compiled
    bundle_bytes: int  # upper bound of the bundle's size
    memory_bytes: int  # estimated peak memory of the build
    scratch_bytes: int = 0  # that it writes to TMPDIR at most

    @property
    def models(self) -> dict[str, Checkpoint | HeadCheckpoint]:
        """The target and, if there is one, the draft or head, by name."""
        draft = self.draft or self.head
        return {"target": self.target} | ({"draft": draft} if draft else {})

    @property
    def origins(self) -> dict[str, dict[str, Any]]:
        """The source of each model, and how a GGUF file or a packed checkpoint had quantized it."""
        origins = {name: model.origin for name, model in self.models.items() if isinstance(model, Checkpoint)}
        told = {name: origin.to_dict() for name, origin in origins.items() if origin}
        adapters = {name: getattr(model, "adapter", None) for name, model in self.models.items()}
        told |= {name: told.get(name, {}) | {"adapter": each.source} for name, each in adapters.items() if each}
        return {name: {"source": model.source} | told.get(name, {}) for name, model in self.models.items()}

    @property
    def kind(self) -> str:
        """The kind of draft as in the manifest: "model", "parallel", "eagle3" or "mtp"."""
        if self.head:
            return "eagle3" if isinstance(self.head, EagleCheckpoint) else MTP
        parallel = self.vocabulary is not None and self.vocabulary.mask_token is not None
        return "parallel" if parallel else "model"

    @property
    def shares_weights(self) -> bool:
        """Return whether the draft shares tensors with the target: all of them, or for a head the embedding."""
        return self.head is not None or self.draft is self.target


def prepare(config: BuildConfig) -> Sources:
    """Find and inspect the checkpoints of a build.

    Raises:
        CheckpointError: A checkpoint cannot be used.
        OptionError: The options do not fit the checkpoints.
    """
    target, draft, vocabulary = checkpoints.find(config.target, config.adapter), None, None
    head: HeadCheckpoint | None = None
    if config.own_draft:
        draft = target
    elif config.draft == MTP:
        head = find_mtp(target)
    elif config.draft and config.drafts and is_eagle(checkpoints.read_config(config.draft)):
        head = find_head(config.draft, target)
    elif config.draft and config.drafts:
        draft = checkpoints.find(config.draft, config.draft_adapter)
        vocabulary = reconcile(target, draft, config.draft_vocab_size or MAX_DRAFTED)
    if head:
        _check_head_types(config)
    _check_kept(config, {"target": target, "draft": draft or head})
    max_seq_len = _max_seq_len(config, target, draft or head)
    models = {"target": target} | ({"draft": draft} if draft else {})
    layouts = {name: probe(checkpoint.config, max_seq_len) for name, checkpoint in models.items()}
    if head:
        layouts["draft"] = head.layout(max_seq_len)
    weights = {n: _weight_shapes(each, None if each is target else vocabulary) for n, each in models.items()}
    names = {name: each.names for name, each in weights.items()}
    calibrated = False
    check_patterns(config.quantize, names, config.backend)
    for name, each in names.items():
        asked = assign(config.quantize, name, config.precision_of(name), config.backend, each).values()
        calibrated = calibrated or config.scheme_of(name) is None or any(scheme.calibrated for scheme in asked)
    if config.quantize.calibration_cache and not calibrated:
        raise OptionError("these precisions are not calibrated, there is nothing to keep: drop --calibration-cache")
    for name, layout in layouts.items():
        _check_layout(config, name, layout)
    # No engine brings its own attention.
    alone = config.architectures and (config.plugin or not config.descriptor.on_gpu) and not config.descriptor.compiles
    sources = models | ({"draft": head} if head else {})
    shapes = [_shape(config, name, sources[name], layout) for name, layout in layouts.items()] if alone else []
    found = Sources(target, draft, head, vocabulary, max_seq_len, layouts, weights, shapes, 0, 0)
    needs = needs_of(config, found)
    return replace(
        found,
        bundle_bytes=bundle_bytes(config, needs),
        memory_bytes=max(each.memory for each in needs.values()),
        scratch_bytes=max(each.scratch for each in needs.values()),
    )


def with_own_draft(config: BuildConfig) -> BuildConfig:
    """Return the options with the draft that the target's checkpoint brings, if they say nothing of a draft.

    Raises CheckpointError.
    """
    if config.draft is not None or config.descriptor.on_gpu or not checkpoints.read_config(config.target):
        return config
    header = read_header(weight_files(config.target, checkpoints.locate(config.target)))
    return replace(config, draft=MTP) if has_mtp(header.shapes) else config


def needs_of(config: BuildConfig, sources: Sources) -> dict[str, Needs]:
    """Return what a build takes of each model, whose precisions may be others than the sources were prepared for.

    The target's memory includes the check of the bundle, which has all models.
    """
    stored = {n: _stored(config, n, model, sources.weights.get(n)) for n, model in sources.models.items()}
    checks, found = _of_check(config, sources, sum(stored.values())), dict[str, Needs]()
    for name, model in sources.models.items():
        base = {"libraries": BASE_BYTES[config.descriptor.compiles]}
        peaks = [base | building_memory(config, name, model)] + [base | checks] * (name == "target")
        uses = max(peaks, key=lambda each: sum(each.values()))
        required = max(sum(each.values()) - each.get(MAPPED, 0) for each in peaks)
        calibration = _calibration(config, name, sources.weights.get(name))
        found[name] = Needs(stored[name], _scratch(config, name, model, sources), calibration, uses, required)
    return found


def bundle_bytes(config: BuildConfig, needs: Mapping[str, Needs]) -> int:
    """Return how many bytes a bundle of such models takes at most."""
    engines = config.descriptor.compiles
    code = PROFILE_BYTES * (len(config.buckets) + 1) * len(needs) if engines else 0
    weights = sum(each.weights for each in needs.values())
    return weights + TEXT_BYTES + CUBINS_BYTES * len(config.architectures) + code


def disk_bytes(config: BuildConfig, needs: Mapping[str, Needs]) -> int:
    """Return the room that a build takes where its bundle goes: an engine is compiled from a graph beside it."""
    bundle = bundle_bytes(config, needs) * (2 if config.descriptor.compiles else 1)
    return bundle + sum(each.calibration for each in needs.values())


def memory_limit() -> int:
    """Return this machine's memory in bytes, or what this process's control group may use of it."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in map(Path, LIMITS):
        text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
        found += [int(text)] if text.isdigit() else []  # "max": no limit
    return min(found)


def _weight_shapes(checkpoint: Checkpoint, vocabulary: Vocabulary | None) -> WeightShapes:
    """Return the shapes of a model's weights, whose embedding and head have a draft's rows if it is one."""
    net = empty(checkpoint.config)[1]
    if vocabulary:
        fit(net, vocabulary, of_model(net))
    return WeightShapes(Names.of(net), {name: tuple(weight.shape) for name, weight in net.named_parameters()})


def _stored(config: BuildConfig, name: str, model: Checkpoint | HeadCheckpoint, weights: WeightShapes | None) -> int:
    """Return how many bytes a model's weights take in the bundle at most, with padding."""
    precision, dtype = config.precision_of(name), config.dtype_of(name)
    if weights is None:
        return item_bytes(dtype) * model.parameters * 33 // 32
    if config.keeps(name):
        blocks, others, experts = _own_blocks(model, weights.names, None), dict[str, Scheme](), None
    else:
        others = assign(config.quantize, name, precision, config.backend, weights.names)
        blocks, experts = _own_blocks(model, weights.names, others), experts_scheme(config, name)
    shapes, head = dict(weights.shapes), f"{weights.names.head}.weight"
    if config.descriptor.on_gpu:  # where an embedding is looked up in 16 bits
        embedding = f"{weights.names.embedding}.weight"
        blocks.pop(embedding, None)
        scheme = others.get(weights.names.head or "")
        if weights.names.tied and (head in blocks or (scheme and scheme.quantized)):
            shapes[head] = shapes[embedding]
    rows = {key: shape[0] for key, shape in shapes.items() if key in blocks}
    own = sum(count * blocks[key] for key, count in rows.items())
    rest = {key: shape for key, shape in shapes.items() if key not in rows}
    return (own + weight_bytes(rest, others, dtype, experts)) * 33 // 32


def _own_blocks(
    model: Checkpoint | HeadCheckpoint, names: Names, schemes: Mapping[str, Scheme] | None
) -> dict[str, int]:
    """Return the bytes of a row of each weight that stays in its file's blocks: all, or those that `schemes` let."""
    tensors = model.tensors if isinstance(model, Checkpoint) else None
    if not tensors:
        return {}
    embedding, head = f"{names.embedding}.weight", f"{names.head}.weight"
    every = {head: tensors[embedding]} | dict(tensors) if embedding in tensors else tensors
    return {f"{name}.weight": each.row_bytes for name, each in own_blocks(every, names, schemes=schemes).items()}


def _of_check(config: BuildConfig, sources: Sources, weights: int) -> dict[str, int]:
    """Return the memory of the check of a bundle with so many bytes of weights, by use; {} if it runs elsewhere."""
    if config.descriptor.on_gpu:
        return {}
    rows, layouts = min(CHECK_TOKENS, capacity_of(config, sources.max_seq_len)), sources.layouts.values()
    values = sum(each.row_values for each in layouts) * rows + sum(each.state_values for each in layouts)
    return {
        MAPPED: weights,
        "caches of the check": CHECK_SLOTS * values * 4,
        "logits of the check": CHECK_TOKENS * sources.target.vocab_size * 4,
    }


def _scratch(config: BuildConfig, name: str, model: Checkpoint | HeadCheckpoint, sources: Sources) -> int:
    """Return what a build writes to TMPDIR for one model: logits, and candidates that are timed."""
    vocab_size, precision = sources.target.vocab_size, config.precision_of(name)
    held_out = min(MAX_LOGITS, held_out_tokens(config) * vocab_size) * config.quantizes
    candidates = name == "target" and chooses(precision) and precision != AUTO
    checked = LOGITS_FILES * CHECK_TOKENS * vocab_size
    return 4 * max(checked, LOGITS_FILES * held_out) + CANDIDATE_BYTES * model.parameters * candidates


def _calibration(config: BuildConfig, name: str, weights: WeightShapes | None) -> int:
    """Return what the weights take at most that are saved when they are calibrated, or found on a grid."""
    precision = config.precision_of(name)
    if weights is None or not config.quantizes or config.keeps(name):
        return 0
    each = [assign(config.quantize, name, precision, config.backend, weights.names)]
    if chooses(precision):
        each += [assign(config.quantize, name, rung, config.backend, weights.names) for rung in RUNGS]
    return sum(saved_bytes(weights.shapes, schemes) for schemes in each)


def _check_kept(config: BuildConfig, models: Mapping[str, Checkpoint | HeadCheckpoint | None]) -> None:
    """Raise OptionError if a model that has no blocks of its own is to keep them."""
    for name, model in models.items():
        if not model or not config.keeps(name):
            continue
        option = "--precision" if name == "target" else "--draft-precision"
        if not isinstance(getattr(model, "origin", None), Gguf):
            raise OptionError(f"keep is for a GGUF file, and {model.source} is none: give another {option}")
        if isinstance(model, Checkpoint) and model.adapter:
            raise OptionError(f"keep is for a file's own numbers, which an adapter changes: give another {option}")


def _check_head_types(config: BuildConfig) -> None:
    """Raise OptionError for an adapter, quantization on a GPU and FP8 caches, which heads do not support yet."""
    scheme = config.scheme_of("draft")
    if config.descriptor.on_gpu and (scheme is None or scheme.quantized):
        raise OptionError("a head is not quantized on a GPU yet: give --draft-precision fp16")
    if config.engine.kv_cache_dtype == "fp8":
        raise OptionError("a head is not calibrated for FP8 caches yet: give --kv-cache-dtype auto")
    if config.draft_vocab_size is not None:
        raise OptionError("a head is not trimmed, it has the tokens that it was trained for: drop --draft-vocab-size")
    config.check_draft_model(False)


def _check_layout(config: BuildConfig, name: str, layout: Layout) -> None:
    """Raise OptionError for attention that the backend does not have."""
    if config.descriptor.on_gpu and (special := layout.special):
        raise OptionError(f"the {name} has {special}, which a GPU's attention does not have yet: use {DEFAULT}")
    size = layout.caches[0].key
    if config.plugin:
        try:
            nvrtc.Shape(size, "F16", "F16")
        except OptionError as error:
            raise OptionError(f"the {name} has no plugin, {error}: use --attention native") from None
    elif config.descriptor.compiles and config.dtype_of(name) != "fp32" and size % 8:
        raise OptionError(
            f"the {name} has heads of {size}, TensorRT's attention in 16 bits takes multiples of 8: use fp32"
        )


def _shape(config: BuildConfig, name: str, checkpoint: Checkpoint | HeadCheckpoint, layout: Layout) -> nvrtc.Shape:
    """Return the shape that TreeAttention is compiled for: of the type that the bundle computes in.

    Where a bundle does not use it, float16 stays, and other types are bfloat16. The cache has the same type. Raises
    OptionError for a head size that the kernels do not support.
    """
    computed = config.dtype_of(name) if config.plugin else checkpoint.config.dtype
    dtype = "F16" if computed in ("fp16", torch.float16) else "BF16"
    try:
        return nvrtc.Shape(layout.caches[0].key, dtype, dtype)
    except OptionError as error:
        raise OptionError(f"the {name} has no kernels, {error}: build it without --cuda-arch") from None


def _max_seq_len(config: BuildConfig, target: Checkpoint, draft: Checkpoint | HeadCheckpoint | None) -> int:
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
