"""The build: checkpoints → portable graphs → passes → lowering → bundle → check.

Everything is written to a hidden folder beside the output, which is renamed when all is done; whatever stops the
build, the hidden folder goes and an older bundle stays as it was.
"""

from __future__ import annotations

import gc
import importlib
import json
import platform
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from ..runtime.bundle import MANIFEST, SCHEMA_VERSION, FileRecord, KernelRecord, Manifest, ModelRecord, file_record
from ..runtime.errors import OptionError
from . import checkpoint as checkpoints
from . import kernels, passes
from .check import check, rounding, tokenize
from .checkpoint import Checkpoint
from .config import BUCKETS, LONGEST_DEFAULT, BuildConfig
from .export import export
from .layout import Layout, probe
from .lower import BACKENDS
from .output import check_output, staging
from .quantize import QUANTIZERS
from .reference import Reference, greedy, text_logits

TOKENIZER, CHAT_TEMPLATE, REPORT, WEIGHTS = "tokenizer.json", "chat_template.jinja", "report.json", "weights.bin"
KERNELS = "kernels"
CUBINS_BYTES = 2 << 20  # of one architecture, at most
INLINE_BYTES = 1024  # smaller tensors stay in the graph file
LIBRARIES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "tokenizers", "numpy")
Progress = Callable[[str], None]


@dataclass
class _Build:
    """One build under way."""

    config: BuildConfig
    folder: Path
    progress: Progress
    target: Checkpoint
    draft: Checkpoint | None
    max_seq_len: int
    layouts: dict[str, Layout]
    shapes: list[kernels.Shape]  # of TreeAttention, where kernels are asked for
    bound: float
    check_tokens: int = 0  # of output, per prompt of the check
    references: list[Reference] = field(default_factory=list)
    reference_logits: list[NDArray[np.float32]] = field(default_factory=list)
    models: dict[str, ModelRecord] = field(default_factory=dict)
    kernels: dict[str, KernelRecord] = field(default_factory=dict)
    kernel_report: dict[str, Any] | None = None
    matched: dict[str, dict[str, int]] = field(default_factory=dict)
    operators: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # per model and stage, how many
    seconds: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)  # hashed so far; nothing is written twice

    @property
    def lowering(self) -> ModuleType:
        """The module that lowers for the asked backend."""
        return importlib.import_module(f".lower{BACKENDS[self.config.backend].module}", __package__)

    @property
    def capacity(self) -> int:
        """Cache rows of a slot: the longest text, and the largest bucket, whose padded nodes write there too."""
        return self.max_seq_len + BUCKETS[-1]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce a stage, and note how long it took."""
        self.progress(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 3)


def stages(config: BuildConfig) -> int:
    """How many stages a build announces."""
    return 1 + 5 + (3 if config.draft else 0) + bool(config.cuda_arch)


def build(config: BuildConfig, progress: Progress = lambda stage: None) -> dict[str, Any]:
    """Build a bundle at `config.output`; returns its report. Raises SpecbuildError, and leaves nothing then."""
    check_output(config)
    if config.cuda_arch:
        kernels.check_compiler(config.architectures)
    progress("checkpoints")
    target = checkpoints.find(config.target)
    draft = checkpoints.find(config.draft) if config.draft else None
    if draft:
        checkpoints.check_pair(target, draft)
    max_seq_len = _max_seq_len(config, target, draft)
    models = {"target": target} | ({"draft": draft} if draft else {})
    layouts = {name: probe(checkpoint.config, max_seq_len) for name, checkpoint in models.items()}
    shapes = [_shape(name, models[name], layout) for name, layout in layouts.items()] if config.cuda_arch else []
    bound = BACKENDS[config.backend].bound
    size = _expected_bytes(target, draft) + CUBINS_BYTES * len(config.architectures)
    with staging(config, size) as folder:
        return _run(_Build(config, folder, progress, target, draft, max_seq_len, layouts, shapes, bound))


def _run(work: _Build) -> dict[str, Any]:
    if work.shapes:
        with work.stage("kernels"):
            _save_kernels(work)
    _compile(work, "target", work.target)
    if work.draft:
        _compile(work, "draft", work.draft)
    template = _save_tokenizer(work)
    _write_manifest(work, template)
    with work.stage("check"):
        if work.config.precision in QUANTIZERS:  # rounding grows: activations are rounded too
            work.bound = max(work.bound, 2 * rounding(work.folder, work.references))
            _write_manifest(work, template)
        exactness = check(work.folder, work.references, work.reference_logits, work.check_tokens)
    report = {
        "seconds": work.seconds,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "matched_passes": work.matched,
        "operators": work.operators,
        "kernels": work.kernel_report,
        "memory": _memory_plan(work),
        "exactness": exactness,
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
    }
    (work.folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _write_manifest(work, template)
    return report


def _compile(work: _Build, name: str, checkpoint: Checkpoint) -> None:
    """One model from checkpoint to graphs; for the target, what Hugging Face makes of the check's prompts."""
    layout, precision = work.layouts[name], work.config.precision_of(name)
    with work.stage(f"{name}: load"):
        model = checkpoints.load(checkpoint, "eager")
        parameters = model.num_parameters()
        checkpoints.fit_vocabulary(model, work.target.vocab_size)
    if name == "target":
        with work.stage("target: Hugging Face reference"):
            prompts, work.check_tokens = tokenize(checkpoint.tokenizer, work.max_seq_len)
            work.references = greedy(model, prompts, work.check_tokens, checkpoint.eos_token_ids())
            work.reference_logits = [text_logits(model, reference.text) for reference in work.references]
    with work.stage(f"{name}: export"):
        graph = export(model, layout, work.max_seq_len, work.capacity)
        work.operators[name] = {"exported": passes.census(graph)}
    with work.stage(f"{name}: fuse and lower"):
        work.matched[name] = passes.run_portable(graph)
        work.operators[name]["fused"] = passes.census(graph)
        if precision in QUANTIZERS:
            quantizer = QUANTIZERS[precision]()
            quantizer(graph)
            work.matched[name][type(quantizer).__name__] = quantizer.matched
            passes.clean(graph)
        graphs = _save_graphs(work, name, graph)
    del model, graph
    gc.collect()
    work.models[name] = ModelRecord(
        source=checkpoint.source,
        source_sha256=checkpoint.sha256(),
        architecture=checkpoint.architecture,
        parameters=parameters,
        precision=precision,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=work.lowering.cache_width(layout.head_dim),
        windows=sorted(set(layout.windows)),
        vocab_size=work.target.vocab_size,
        capacity=work.capacity,
        max_positions=checkpoint.max_positions,
        graphs=graphs,
        inputs=work.lowering.INPUTS,
        outputs=work.lowering.OUTPUTS,
    )


def _save_graphs(work: _Build, name: str, graph: ir.Model) -> dict[str, str]:
    """One graph file per batch size beside one file of weights."""
    folder = work.folder / name
    folder.mkdir()
    large = [v for v in graph.graph.initializers.values() if v.const_value and v.const_value.nbytes >= INLINE_BYTES]
    stored = ir.external_data.convert_tensors_to_external([v.const_value for v in large], folder, WEIGHTS)  # type: ignore[misc]
    for value, tensor in zip(large, stored, strict=True):
        value.const_value = tensor
    files = {}
    for batch_size in work.config.batch_sizes:
        file = f"{name}/batch{batch_size}.onnx"
        lowered = work.lowering.lower(graph, batch_size, work.capacity)
        work.operators[name].setdefault("lowered", passes.census(lowered))
        ir.save(lowered, work.folder / file)
        files[str(batch_size)] = file
    return files


def _shape(name: str, checkpoint: Checkpoint, layout: Layout) -> kernels.Shape:
    """What TreeAttention is compiled for: float16 stays, all else computes in bfloat16, and the cache holds the same.

    Raises OptionError for a head size that it has not.
    """
    dtype = "F16" if checkpoint.config.dtype == torch.float16 else "BF16"
    try:
        return kernels.Shape(layout.head_dim, dtype, dtype)
    except OptionError as error:
        raise OptionError(f"the {name} has no kernels, {error}: build it without --cuda-arch") from None


def _save_kernels(work: _Build) -> None:
    """A cubin per source, shape and architecture."""
    cubins = kernels.compile_kernels(work.config.architectures, work.shapes)
    for cubin in cubins:
        file = f"{KERNELS}/{cubin.name}.cubin"
        (work.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (work.folder / file).write_bytes(cubin.image)
        work.kernels[file] = KernelRecord(cubin.architecture, sorted(cubin.kernels))
    work.kernel_report = kernels.report(cubins)


def _save_tokenizer(work: _Build) -> str | None:
    """tokenizer.json as `transformers` uses it, and the chat template where there is one."""
    tokenizer = work.target.tokenizer
    (work.folder / TOKENIZER).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        return None
    (work.folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    return CHAT_TEMPLATE


def _write_manifest(work: _Build, template: str | None) -> None:
    """The manifest of what lies in the folder; files are hashed the first time they are seen."""
    config, tokenizer = work.config, work.target.tokenizer
    names = [p.relative_to(work.folder).as_posix() for p in sorted(work.folder.rglob("*")) if p.is_file()]
    work.files |= {n: file_record(work.folder / n) for n in names if n != MANIFEST and n not in work.files}
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        specbuild_version=version("specbuild-trt"),
        libraries={name: version(name) for name in LIBRARIES},
        backend=config.backend,
        precision=config.precision,
        exactness_bound=work.bound,
        max_seq_len=work.max_seq_len,
        max_batch_size=config.max_batch_size,
        buckets=list(BUCKETS),
        default_tree=config.tree,
        eos_token_ids=work.target.eos_token_ids(),
        special_tokens=special,
        tokenizer=TOKENIZER,
        chat_template=template,
        models=work.models,
        files=work.files,
        kernels=work.kernels,
    )
    (work.folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def _memory_plan(work: _Build) -> dict[str, int]:
    """Bytes by what takes them when the bundle runs, the caches per sequence."""
    weights = sum((work.folder / name / WEIGHTS).stat().st_size for name in work.models)
    rows = sum(2 * m.layers * m.kv_heads * m.head_dim * m.capacity * 4 for m in work.models.values())
    return {"weights": weights, "caches_per_sequence": rows}


def _max_seq_len(config: BuildConfig, target: Checkpoint, draft: Checkpoint | None) -> int:
    """What was asked for, if both models take it; else what both take, at most LONGEST_DEFAULT."""
    for name, checkpoint in (("target", target), ("draft", draft)):
        if checkpoint and config.max_seq_len and config.max_seq_len > checkpoint.max_positions:
            raise OptionError(
                f"max-seq-len {config.max_seq_len} is beyond the {name}'s {checkpoint.max_positions} positions"
            )
    longest = min(c.max_positions for c in (target, draft) if c)
    return config.max_seq_len or min(longest, LONGEST_DEFAULT)


def _expected_bytes(*models: Checkpoint | None) -> int:
    """A bundle's size at most: float32 of weights stored in 16 bits, and the graphs."""
    return sum(2 * path.stat().st_size for model in models if model for path in model.weights) + (8 << 20)
