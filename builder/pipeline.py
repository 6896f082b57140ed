"""The build: checkpoints → portable graphs → passes → quantization → lowering → bundle → check.

Everything is written to a hidden folder beside the output, which is renamed when all is done; whatever stops the
build, the hidden folder goes and an older bundle stays as it was.
"""

from __future__ import annotations

import gc
import json
import platform
import resource
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from specbuild.builder.check.bundle_check import MAX_DIVERGENCE, check, inspected, rounding, tokenize, unrunnable
from specbuild.builder.check.standard_chain import graph_difference, standard_chain
from specbuild.builder.config.quantize_options import AUTO
from specbuild.builder.quantize.assignment import assign
from specbuild.measure.tuning.tune import tune_build
from specbuild.runtime import Engine
from specbuild.runtime.backends.executor import ON_GPU
from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.atomic_output import check_output, staging
from specbuild.runtime.bundle.manifest import MODULES, REPORT, Manifest, ModelRecord
from specbuild.runtime.errors import ExecutionError

from . import passes
from .build_state import BuildState, Detail, Progress
from .bundle_writer import memory_plans, save_kernels, save_tokenizer, write_manifest
from .check.rounding import DTYPES, measure
from .check.step_times import plain_graph, step_times
from .codegen import nvrtc
from .codegen.emit import emit, lowering
from .codegen.products import count
from .codegen.tensorrt import check_machine
from .config.build_config import BuildConfig
from .frontend.checkpoint import Checkpoint
from .frontend.eagle3_head import EagleCheckpoint
from .frontend.export import export
from .frontend.hidden_state_taps import Taps
from .frontend.reference import greedy, text_logits
from .frontend.vocabulary import by_token
from .lower.lanes import cache_width
from .lower.plugin import PAGED
from .model_loading import columns_of, load_model, save_tokens, tokens_of
from .passes.spread_logits import spread_logits
from .prepare import prepare
from .quantize import texts
from .quantize.fp8_caches import Scales, calibrate
from .quantize.linears import Names, simulated
from .quantize.quality import Before, moved
from .quantize.rewrite import Quantize, check_products
from .quantize.stage import Request, quantize_model
from .targets import BOUND

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def stages(config: BuildConfig) -> int:
    """How many stages a build announces."""
    models = len(config.models)
    fp8 = models if config.engine.kv_cache_dtype == "fp8" else 0
    quantized = 1 + models * (2 if config.backend == "onnxruntime" else 1) if config.quantizes else 0
    return 4 + 3 * models + fp8 + quantized + bool(config.architectures) + (config.backend in ON_GPU) + config.tune


def build(
    config: BuildConfig, progress: Progress = lambda stage: None, detail: Detail = lambda phase, share: None
) -> dict[str, Any]:
    """Build a bundle at `config.output`; returns its report. Raises SpecbuildError, and leaves nothing then.

    progress: told each stage as it begins. detail: told what goes on meanwhile, and its share that is done.
    """
    check_output(config.output, config.force)
    if config.backend in MODULES:
        check_machine(config.backend, config.engine, config.fp8)
    if config.architectures:
        nvrtc.check_compiler(config.architectures)
    progress("checkpoints")
    source = prepare(config)
    progress(f"about {source.check_memory() >> 20} MiB of memory will be needed")
    with staging(config.output, source.bundle_bytes) as folder:
        return _run(BuildState(config, folder, progress, detail, source))


def _run(work: BuildState) -> dict[str, Any]:
    if work.config.architectures:
        with work.stage("kernels"):
            save_kernels(work)
    if work.config.quantizes:
        asked, tokenizer = work.config.quantize, work.source.target.tokenizer
        size = asked.calib_size, asked.calib_seed
        work.texts = texts.read(asked.calibration, tokenizer, work.source.max_seq_len - 1, *size)  # room for one more
    for name, checkpoint in work.source.models.items():
        with ExitStack() as scratch:
            _compile(work, name, checkpoint, scratch)
    template = save_tokenizer(work)
    manifest = write_manifest(work, template)
    exactness = _check(work, manifest, template)
    found = None
    if work.config.quantizes:
        with work.stage("quality"):
            found = _quality(work)
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
        "memory": memory_plans(manifest, work.config),
        "exactness": exactness,
        "quality": found,
        "tuning": tuning,
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
    }
    (work.folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    write_manifest(work, template)
    return report


def _check(work: BuildState, manifest: Manifest, template: str | None) -> dict[str, Any]:
    """The bundle against Hugging Face and itself; for GPUs, what can be checked here."""
    with work.stage("check"):
        if work.config.backend == "onnxruntime" and work.found("target"):
            work.bound = max(work.bound, 2 * rounding(work.folder, work.references))  # activations are rounded too
            write_manifest(work, template)
        missing = unrunnable(manifest) if work.config.backend in ON_GPU else None
        if missing:
            exactness: dict[str, Any] = {"bound": work.bound, "cases": [], "not_run": missing}
        else:
            limit = max(MAX_DIVERGENCE, work.config.max_kl) if work.config.quantizes else MAX_DIVERGENCE
            exactness = check(work.folder, work.references, work.reference_logits, work.check_tokens, limit)
            for name, layers in inspected(work.folder, manifest).items():
                work.engine_reports[name]["inspector"] = layers
        if work.graph_difference is not None:
            exactness["graph_logit_difference"] = work.graph_difference
    return exactness


def _compile(work: BuildState, name: str, checkpoint: Checkpoint | EagleCheckpoint, scratch: ExitStack) -> None:
    """One model from checkpoint to graphs; for the target, what Hugging Face makes of the check's prompts."""
    layout, lowered_by = work.source.layouts[name], lowering(work.config)
    with work.stage(f"{name}: load"):
        model, parameters = load_model(work, name)
    if name == "target":
        with work.stage("target: Hugging Face reference"):
            prompts, work.check_tokens = tokenize(work.source.target.tokenizer, work.source.max_seq_len)
            work.references = greedy(model, prompts, work.check_tokens, work.source.target.eos_token_ids())
            work.reference_logits = [text_logits(model, reference.text) for reference in work.references]
    if work.config.engine.kv_cache_dtype == "fp8":
        with work.stage(f"{name}: calibrate"):
            work.scales[name] = calibrate(model, [reference.text for reference in work.references])
    scales = work.scales.get(name)
    with work.stage(f"{name}: export"):
        taps = work.head and name == "target" and Taps(work.head.config.taps, work.head.fc)
        graph = export(model, layout, work.source.max_seq_len, work.capacity, taps or None)
        work.operators[name] = {"exported": passes.census(graph)}
        work.matched[name] = passes.run_portable(graph)
        work.operators[name]["fused"] = passes.census(graph)
        tokens = tokens_of(work) if name == "draft" else None
        if tokens and work.config.backend in ON_GPU:
            spread_logits(graph.graph, tokens, columns_of(work, name))
    if work.config.quantizes and isinstance(checkpoint, Checkpoint):
        with work.stage(f"{name}: quantize"), by_token(model, tokens, work.source.target.vocab_size):
            _quantize(work, name, model, checkpoint, graph)
    with work.stage(f"{name}: lower"):
        plain = scratch.enter_context(plain_graph(graph, work.capacity)) if work.times_steps(name) else None
        precision = _rewrite(work, name, graph)
        work.products[name] = asdict(count(graph, memory_plan.item_bytes(precision)))
        sizes = work.capacity, work.source.max_seq_len
        stored = work.stored if work.source.shares_weights else None
        emitted = emit(work.folder, name, graph, work.config, *sizes, work.detail, scales, stored)
        work.operators[name]["lowered"] = emitted.lowered
        work.engines |= emitted.engines
        if emitted.report:
            work.engine_reports[name] = emitted.report
    if name == "target" and work.config.backend in ON_GPU:
        with work.stage("target: graph against Hugging Face"):
            _check_graph(work, graph, model, scales)
    del model, graph
    gc.collect()
    if plain:
        with work.stage(f"{name}: steps"):
            each = {"quantized": work.folder / emitted.graphs["1"], "float32": plain}
            work.quantized[name].measured["steps"] = step_times(
                each, work.spec(name, columns_of(work, name)), work.config.buckets[-1]
            )
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
        vocab_size=columns_of(work, name),
        capacity=work.capacity,
        max_positions=checkpoint.max_positions,
        graphs=emitted.graphs,
        inputs=lowered_by.INPUTS
        | (PAGED if work.config.engine.block_size else {})
        | ({"hidden": "hidden_in"} if work.head and name == "draft" else {}),
        outputs=lowered_by.OUTPUTS | ({"hidden": "hidden"} if work.head else {}),
        kind=work.source.kind if name == "draft" else "model",
        hidden=work.head.config.hidden_size if work.head else 0,
        mask_token=work.source.vocabulary.mask_token if name == "draft" and work.source.vocabulary else None,
        tokens=save_tokens(work) if name == "draft" and work.config.backend not in ON_GPU else None,
    )


def _quantize(work: BuildState, name: str, model: PreTrainedModel, checkpoint: Checkpoint, graph: ir.Model) -> None:
    """A model's numbers, and what it computed on held-out texts without them."""
    assert work.texts is not None
    work.names[name] = names = Names.of(model)  # loaded, it may be tied otherwise than its configuration says
    asked, precision = work.config.quantize, work.config.precision_of(name)
    schemes = assign(asked, name, precision, work.config.backend, names)
    check_products(graph, schemes)
    eos, longest = checkpoint.eos_token_ids(), work.source.max_seq_len
    before = Before.of(model, work.texts.held_out, eos, longest)
    judged_by = work.quantized["target"].before if name == "draft" else before
    item = memory_plan.item_bytes(work.config.dtype_of(name))
    request = Request(name, precision, work.config.backend, asked, work.texts, work.config.max_kl, item)
    work.quantized[name] = quantize_model(
        model, request, names, schemes, before, judged_by.greedy, checkpoint.sha256(), work.detail
    )


def _rewrite(work: BuildState, name: str, graph: ir.Model) -> str:
    """Put a model's numbers into its graph; returns what its precision is called."""
    dtype, found = work.config.dtype_of(name), work.found(name)
    if not found:
        return dtype
    quantizer = Quantize(found, work.names[name])
    quantizer(graph)
    work.matched[name][type(quantizer).__name__] = quantizer.matched
    passes.clean(graph)
    asked = work.config.precision_of(name)
    called = asked if asked == AUTO or work.config.scheme_of(name).quantized else "mixed"  # type: ignore[union-attr]
    return called if dtype == "fp32" or "/" in called else f"{called}/{dtype}"


def _check_graph(work: BuildState, graph: ir.Model, model: PreTrainedModel, scales: Scales | None) -> None:
    """The target's graph as ONNX Runtime computes it in float32 here, and how far 16 bits will be from that."""
    found, dtype = work.found("target"), work.config.dtype_of("target")
    with simulated(model, found):
        logits = work.reference_logits
        if found:
            logits = [text_logits(model, reference.text) for reference in work.references]
        with standard_chain(graph, work.capacity) as chain:
            rounds = any(each.input_scale is not None for each in found.values())
            work.graph_difference = graph_difference(chain, work.references, logits, rounds)
            if found:
                work.quantized["target"].measured |= moved(work.quantized["target"].before, chain)
        if dtype in DTYPES:
            rounded = measure(model, dtype, work.references, logits, scales)
            work.bound, work.fp8_caches = max(BOUND, 2 * rounded.gap), rounded.fp8_caches


def _quality(work: BuildState) -> dict[str, Any]:
    """What quantization cost, by model; raises ExecutionError where that is more than was allowed."""
    assert work.texts is not None
    if work.config.backend == "onnxruntime" and work.found("target"):
        with Engine.load(work.folder, prefix_caching=False) as engine:
            work.quantized["target"].measured |= moved(work.quantized["target"].before, engine.text_logits)
    told = {name: each.to_dict() for name, each in work.quantized.items()}
    cost, max_kl = told["target"].get("kl_nats_per_token", 0.0), work.config.max_kl
    if not cost <= max_kl:  # NaN is more than anything
        raise ExecutionError(
            f"the target moved by {cost:.2g} nats a token, more than --max-kl {max_kl:g}: nothing was written, use a "
            "wider --precision, or allow more"
        )
    return {"texts": work.texts.to_dict(), "models": told}
