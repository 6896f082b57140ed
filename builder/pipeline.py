"""The build: checkpoints → portable graphs → passes → lowering → bundle → check.

Everything is written to a hidden folder beside the output, which is renamed when all is done; whatever stops the
build, the hidden folder goes and an older bundle stays as it was.
"""

from __future__ import annotations

import gc
import json
import platform
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime import memory
from ..runtime.backends import ON_GPU
from ..runtime.bundle import (
    MANIFEST,
    MODULES,
    REPORT,
    SCHEMA_VERSION,
    EngineRecord,
    FileRecord,
    KernelRecord,
    Manifest,
    ModelRecord,
    file_record,
)
from . import checkpoint as checkpoints
from . import kernels, passes
from .calibrate import Scales, calibrate
from .check import check, graph_difference, inspected, rounding, tokenize, unrunnable
from .checkpoint import Checkpoint
from .compile import capacity_of, check_machine
from .config import BuildConfig
from .emit import emit, lowering
from .export import export
from .lower import BOUND
from .lower.lanes import cache_width
from .lower.plugin import PAGED
from .output import check_output, staging
from .prepare import Sources, prepare
from .products import count
from .quantize import QUANTIZERS
from .reference import Reference, greedy, text_logits
from .rounding import DTYPES, measure
from .tuning.tune import tune_build

TOKENIZER, CHAT_TEMPLATE = "tokenizer.json", "chat_template.jinja"
KERNELS = "kernels"
LIBRARIES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "tokenizers", "numpy")
Progress = Callable[[str], None]
Detail = Callable[[str, float], None]


@dataclass
class _Build:
    """One build under way."""

    config: BuildConfig
    folder: Path
    progress: Progress
    detail: Detail
    source: Sources
    bound: float = BOUND
    graph_difference: float | None = None  # of the target's logits, for GPUs
    check_tokens: int = 0  # of output, per prompt of the check
    scales: dict[str, Scales] = field(default_factory=dict)  # of FP8 caches, by model
    fp8_caches: dict[str, Any] | None = None  # what they change in the target
    references: list[Reference] = field(default_factory=list)
    reference_logits: list[NDArray[np.float32]] = field(default_factory=list)
    models: dict[str, ModelRecord] = field(default_factory=dict)
    kernels: dict[str, KernelRecord] = field(default_factory=dict)
    engines: dict[str, EngineRecord] = field(default_factory=dict)
    engine_reports: dict[str, Any] = field(default_factory=dict)  # by model
    kernel_report: dict[str, Any] | None = None
    matched: dict[str, dict[str, int]] = field(default_factory=dict)
    operators: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # per model and stage, how many
    products: dict[str, Any] = field(default_factory=dict)  # by model, what `specbuild profile` computes with
    seconds: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)  # hashed so far; nothing is written twice

    @property
    def capacity(self) -> int:
        """Cache rows of a slot; see `capacity_of`."""
        return capacity_of(self.config, self.source.max_seq_len)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce a stage, and note how long it took."""
        self.progress(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 3)


def stages(config: BuildConfig) -> int:
    """How many stages a build announces."""
    models = 2 if config.draft else 1
    fp8 = models if config.engine.kv_cache_dtype == "fp8" else 0
    return 4 + 3 * models + fp8 + bool(config.architectures) + (config.backend in ON_GPU) + config.tune


def build(
    config: BuildConfig, progress: Progress = lambda stage: None, detail: Detail = lambda phase, share: None
) -> dict[str, Any]:
    """Build a bundle at `config.output`; returns its report. Raises SpecbuildError, and leaves nothing then.

    progress: told each stage as it begins. detail: told what a compiler does meanwhile, and its share that is done.
    """
    check_output(config)
    if config.backend in MODULES:
        check_machine(config.backend, config.engine)
    if config.architectures:
        kernels.check_compiler(config.architectures)
    progress("checkpoints")
    source = prepare(config)
    progress(f"about {source.check_memory() >> 20} MiB of memory will be needed")
    with staging(config.output, source.bundle_bytes) as folder:
        return _run(_Build(config, folder, progress, detail, source))


def _run(work: _Build) -> dict[str, Any]:
    if work.config.architectures:
        with work.stage("kernels"):
            _save_kernels(work)
    for name, checkpoint in work.source.models.items():
        _compile(work, name, checkpoint)
    template = _save_tokenizer(work)
    manifest = _write_manifest(work, template)
    with work.stage("check"):
        if work.config.precision_of("target") in QUANTIZERS:  # rounding grows: activations are rounded too
            work.bound = max(work.bound, 2 * rounding(work.folder, work.references))
            _write_manifest(work, template)
        missing = unrunnable(manifest) if work.config.backend in ON_GPU else None
        if missing:
            exactness = {"bound": work.bound, "cases": [], "not_run": missing}
        else:
            exactness = check(work.folder, work.references, work.reference_logits, work.check_tokens)
            for name, layers in inspected(work.folder, manifest).items():
                work.engine_reports[name]["inspector"] = layers
        if work.graph_difference is not None:
            exactness["graph_logit_difference"] = work.graph_difference
    tuning = None
    if work.config.tune:
        with work.stage("tune"):
            tuning = tune_build(work.folder)
    report = {
        "seconds": work.seconds,
        "expected_memory_bytes": work.source.memory_bytes,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "matched_passes": work.matched,
        "operators": work.operators,
        "products": work.products,
        "kernels": work.kernel_report,
        "engines": work.engine_reports,
        "fp8_caches": work.fp8_caches
        and work.fp8_caches | {"scales": {n: s.to_dict() for n, s in work.scales.items()}},
        "memory": _memory(manifest, work.config),
        "exactness": exactness,
        "tuning": tuning,
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
    }
    (work.folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _write_manifest(work, template)
    return report


def _compile(work: _Build, name: str, checkpoint: Checkpoint) -> None:
    """One model from checkpoint to graphs; for the target, what Hugging Face makes of the check's prompts."""
    layout, precision, lowered_by = work.source.layouts[name], work.config.precision_of(name), lowering(work.config)
    with work.stage(f"{name}: load"):
        model = checkpoints.load(checkpoint, "eager")
        parameters = model.num_parameters()
        checkpoints.fit_vocabulary(model, work.source.target.vocab_size)
    if name == "target":
        with work.stage("target: Hugging Face reference"):
            prompts, work.check_tokens = tokenize(checkpoint.tokenizer, work.source.max_seq_len)
            work.references = greedy(model, prompts, work.check_tokens, checkpoint.eos_token_ids())
            work.reference_logits = [text_logits(model, reference.text) for reference in work.references]
    if work.config.engine.kv_cache_dtype == "fp8":
        with work.stage(f"{name}: calibrate"):
            work.scales[name] = calibrate(model, [reference.text for reference in work.references])
    scales = work.scales.get(name)
    with work.stage(f"{name}: export"):
        graph = export(model, layout, work.source.max_seq_len, work.capacity)
        work.operators[name] = {"exported": passes.census(graph)}
    with work.stage(f"{name}: fuse and lower"):
        work.matched[name] = passes.run_portable(graph)
        work.operators[name]["fused"] = passes.census(graph)
        if precision in QUANTIZERS:
            quantizer = QUANTIZERS[precision]()
            quantizer(graph)
            work.matched[name][type(quantizer).__name__] = quantizer.matched
            passes.clean(graph)
        work.products[name] = asdict(count(graph, memory.ITEM_BYTES[precision]))
        sizes = work.capacity, work.source.max_seq_len
        emitted = emit(work.folder, name, graph, work.config, *sizes, work.detail, scales)
        work.operators[name]["lowered"] = emitted.lowered
        work.engines |= emitted.engines
        if emitted.report:
            work.engine_reports[name] = emitted.report
    if name == "target" and work.config.backend in ON_GPU:
        with work.stage("target: graph against Hugging Face"):
            each = work.references, work.reference_logits
            work.graph_difference = graph_difference(graph, *each, work.capacity)
    if name == "target" and precision in DTYPES:
        found = measure(model, precision, work.references, work.reference_logits, scales)
        work.bound, work.fp8_caches = max(BOUND, 2 * found.gap), found.fp8_caches
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
        head_dim=cache_width(layout.head_dim) if work.config.backend == "onnxruntime" else layout.head_dim,
        windows=sorted(set(layout.windows)),
        vocab_size=work.source.target.vocab_size,
        capacity=work.capacity,
        max_positions=checkpoint.max_positions,
        graphs=emitted.graphs,
        inputs=lowered_by.INPUTS | (PAGED if work.config.engine.block_size else {}),
        outputs=lowered_by.OUTPUTS,
    )


def _save_kernels(work: _Build) -> None:
    """A cubin per source, shape and architecture."""
    sources = None if work.source.shapes else kernels.sources(kernels.GLUE)
    cubins = kernels.compile_kernels(work.config.architectures, work.source.shapes, sources)
    for cubin in cubins:
        file = f"{KERNELS}/{cubin.name}.cubin"
        (work.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (work.folder / file).write_bytes(cubin.image)
        work.kernels[file] = KernelRecord(cubin.architecture, sorted(cubin.kernels))
    work.kernel_report = kernels.report(cubins)


def _save_tokenizer(work: _Build) -> str | None:
    """tokenizer.json as `transformers` uses it, and the chat template where there is one."""
    tokenizer = work.source.target.tokenizer
    (work.folder / TOKENIZER).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        return None
    (work.folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    return CHAT_TEMPLATE


def _write_manifest(work: _Build, template: str | None) -> Manifest:
    """The manifest of what lies in the folder; files are hashed the first time they are seen."""
    config, tokenizer = work.config, work.source.target.tokenizer
    names = [p.relative_to(work.folder).as_posix() for p in sorted(work.folder.rglob("*")) if p.is_file()]
    work.files |= {n: file_record(work.folder / n) for n in names if n != MANIFEST and n not in work.files}
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        specbuild_version=version("specbuild-trt"),
        libraries={name: version(name) for name in LIBRARIES},
        backend=config.backend,
        precision=config.precision_of("target"),
        exactness_bound=work.bound,
        max_seq_len=work.source.max_seq_len,
        max_batch_size=config.max_batch_size,
        buckets=list(config.buckets),
        default_tree=config.tree,
        eos_token_ids=work.source.target.eos_token_ids(),
        special_tokens=special,
        tokenizer=TOKENIZER,
        chat_template=template,
        models=work.models,
        files=work.files,
        kernels=work.kernels,
        engines=work.engines,
    )
    (work.folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _memory(manifest: Manifest, config: BuildConfig) -> dict[str, Any]:
    """Bytes by what takes them when the bundle runs: for one text of the full length, and by batch and length."""
    one, longest = memory.plan(manifest, 1), manifest.max_seq_len
    lengths = sorted({length for length in (longest // 4, longest // 2, longest) if length})
    plans = [memory.plan(manifest, batch, length).to_dict() for batch in config.batch_sizes for length in lengths]
    return {"weights": one.weights, "caches_per_sequence": one.caches, "plans": plans}
