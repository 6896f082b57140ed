"""The build: checkpoints → portable graphs → passes → quantization → lowering → bundle → check.

Everything is written to a hidden folder beside the output, which is renamed when the build is done. If anything stops
the build, the hidden folder is removed, and an older bundle stays as it was.
"""

from __future__ import annotations

import json
import platform
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from specbuild.measure.exactness import plain
from specbuild.measure.tuning.tune import tune_build
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.backends.cpu.operators import operators
from specbuild.runtime.bundle.atomic_output import check_output, staging
from specbuild.runtime.bundle.manifest import REPORT, Manifest
from specbuild.runtime.errors import ExecutionError, SpecbuildError

from .build_context import BuildContext, Progress, Stages
from .bundle_writer import (
    Kernels,
    make_manifest,
    memory_plans,
    save_kernels,
    save_sampling,
    save_tokenizer,
    write_manifest,
)
from .check.bundle_check import MAX_DIVERGENCE, check, inspected, tokenize, unrunnable
from .codegen import nvrtc
from .codegen.tensorrt import check_machine
from .compiled_model import CompiledModel, CompiledTarget, compile_draft, compile_target, runs_quantized
from .config.build_config import BuildConfig
from .config.progress import Progress as Detail
from .config.quantize_options import QuantizeOptions
from .frontend.quiet import quiet
from .frontend.vocabulary import reference_logits
from .plan import check_room
from .prepare import Sources, prepare, with_own_draft
from .quantize import texts
from .quantize.calibration_folder import calibration_folder
from .quantize.quality import Before, beginnings, first_divergence, moved
from .quantize.texts import Texts
from .units import in_bytes


def stages(config: BuildConfig) -> int:
    """Return the number of stages that a build announces."""
    models, on_gpu = len(config.models), config.descriptor.on_gpu
    fp8 = models if config.engine.kv_cache_dtype == "fp8" else 0
    quantized = 1 + models if config.quantizes else 0
    return 3 + 3 * models + fp8 + quantized + bool(config.architectures) + 2 * on_gpu + config.tune


@quiet()
def build(
    config: BuildConfig, progress: Progress = lambda stage: None, detail: Detail = lambda phase, share: None
) -> dict[str, Any]:
    """Build a bundle at `config.output` and return its report.

    Args:
        config: The options.
        progress: Called with the name of each stage when it begins.
        detail: Called within a stage, with the name of a phase and the share of it that is done.

    Raises:
        SpecbuildError: The build failed; it leaves nothing, except what `calibration_folder` keeps.
    """
    check = partial(check_output, config.output, config.force)
    check()
    config = with_own_draft(config)
    if not config.descriptor.on_gpu:
        operators()
    if config.descriptor.compiles:
        check_machine(config.backend, config.engine, config.fp8)
    if config.architectures:
        nvrtc.check_compiler(config.architectures)
    stages = Stages(progress, detail)
    with stages.timed("checkpoints"):
        source = prepare(config)
    needs = check_room(config, source)
    progress(f"about {in_bytes(needs.memory)} of memory will be needed")
    with calibration_folder(config) as options, staging(config.output, needs.disk, check) as folder:
        try:
            return _run(BuildContext(options, folder, source, stages))
        except SpecbuildError as error:  # the user knows the output, not the hidden folder
            raise type(error)(str(error).replace(str(folder), str(config.output))) from error


def _run(context: BuildContext) -> dict[str, Any]:
    config, source, kernels, quality, tuning = context.config, context.source, Kernels(), None, None
    quant_texts = _texts(config.quantize, source) if config.quantizes else None
    target = compile_target(context, quant_texts)
    models = {"target": target.model}
    if "draft" in source.models:
        models["draft"] = compile_draft(context, quant_texts, target)
    if config.architectures:
        with context.stage("kernels"):
            products = {each for model in models.values() for each in model.emitted.products}
            kernels = save_kernels(context, sorted(products, key=str))
    template = save_tokenizer(context.folder, source.target.tokenizer)
    save_sampling(context.folder, source.target.sampling)
    bound = max(config.descriptor.bound, target.graph.bound)
    manifest = make_manifest(context, models, kernels, bound, template)
    checked = _check(context, write_manifest(context.folder, manifest), target)
    if quant_texts:
        with context.stage("quality"):
            quality = _quality(context, quant_texts, models)
    if config.tune:
        with context.stage("tune"):
            detail = context.stages.detail
            tuning = tune_build(context.folder, lambda what, done, total: detail(what, done / total if total else 0.0))
    report = _report(context, kernels, models, target, checked) | {"quality": quality, "tuning": tuning}
    report |= {"machine": {"platform": platform.platform(), "python": platform.python_version()}}
    (context.folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    write_manifest(context.folder, checked.manifest)
    return report


def _texts(options: QuantizeOptions, source: Sources) -> Texts:
    """Read the texts to calibrate with and to judge quantization by."""
    longest, size = source.max_seq_len - 1, (options.calib_size, options.calib_seed)  # leaves room for one more token
    return texts.read(options.calibration, source.target.tokenizer, longest, *size)


@dataclass(frozen=True, slots=True)
class Checked:
    """Results of the final check.

    Attributes:
        manifest: The manifest with its exactness classes and bound.
        exactness: The report's entry on exactness.
        layers: The engines' layers as TensorRT reports them, by model.
    """

    manifest: Manifest
    exactness: dict[str, Any]
    layers: dict[str, Any]


def _check(context: BuildContext, manifest: Manifest, target: CompiledTarget) -> Checked:
    """Check the bundle against Hugging Face and itself; a bundle for GPUs as far as this machine can."""
    config, folder, layers = context.config, context.folder, dict[str, Any]()
    with context.stage("check"):
        missing = unrunnable(manifest) if config.descriptor.on_gpu else None
        if missing:
            exactness: dict[str, Any] = {"bound": manifest.exactness_bound, "cases": [], "not_run": missing}
        else:
            limit = max(MAX_DIVERGENCE, config.max_kl) if config.quantizes else MAX_DIVERGENCE
            prompts, new_tokens = tokenize(context.source.target.tokenizer, context.source.max_seq_len)
            exactness = check(folder, prompts, new_tokens, partial(reference_logits, context.source.target), limit)
            layers = inspected(folder, manifest)
        if target.graph.difference is not None:
            exactness["graph_logit_difference"] = target.graph.difference
    return Checked(manifest, exactness, layers)


def _quality(context: BuildContext, quant_texts: Texts, models: Mapping[str, CompiledModel]) -> dict[str, Any]:
    """Return what quantization cost, by model; raise ExecutionError if the target's cost exceeds `max_kl`."""
    every, target = {n: model.quantization for n, model in models.items() if model.quantization}, models["target"]
    if target.quantization and runs_quantized(context.config, target.quantization):
        every["target"] = target.quantization.with_measured(_divergence(context, target.quantization.before))
    report = {name: each.to_dict() for name, each in every.items()}
    cost, max_kl = report.get("target", {}).get("kl_nats_per_token", 0.0), context.config.max_kl
    if not cost <= max_kl:  # so that NaN fails, too
        worst = ", ".join(cost.names[0] for cost in sorted(every["target"].costs, key=lambda cost: -cost.kl)[:3])
        raise ExecutionError(
            f"the target moved by {cost:.3g} nats a token, more than --max-kl {max_kl:g}, most by {worst}: nothing was "
            "written, use a wider --precision, or auto, or allow more"
        )
    return {"texts": quant_texts.to_dict(), "models": report}


def _divergence(context: BuildContext, before: Before) -> dict[str, Any]:
    """Return how far the bundle moved from the float32 target, and after how many tokens greedy texts part."""
    prompts, new_tokens = beginnings(before, context.source.max_seq_len)
    params = [SamplingParams(max_new_tokens=new_tokens, seed=0)] * len(prompts)
    with Engine.load(context.folder, batch_size=1, prefix_caching=False) as engine:  # caches are large
        divergence = moved(before, (engine.text_logits(text) for text in before.texts))
        outputs = plain(engine, prompts, params)
    texts = [[*prompt, *tokens[:-1]] for prompt, tokens in zip(prompts, outputs, strict=True)]
    exact = reference_logits(context.source.target, texts)
    places = [first_divergence(*each) for each in zip(prompts, outputs, exact, strict=True)]
    return divergence | {"first_divergence": places, "greedy_tokens": [len(tokens) for tokens in outputs]}


def _report(
    context: BuildContext,
    kernels: Kernels,
    models: Mapping[str, CompiledModel],
    target: CompiledTarget,
    checked: Checked,
) -> dict[str, Any]:
    """Return the report's entries on the bundle, and on the time and memory that the build took."""
    caches, engines = target.graph.fp8_caches, {n: each.emitted.report for n, each in models.items()}
    scales = {name: each.scales.to_dict() for name, each in models.items() if each.scales}
    accounts = {name: {"inspector": layers} for name, layers in checked.layers.items()}
    return {
        "sources": context.source.origins,
        "seconds": context.stages.whole(),
        "expected_memory_bytes": context.source.memory_bytes,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "matched_passes": {name: each.matched for name, each in models.items()},
        "operators": {name: each.operators for name, each in models.items()},
        "products": {name: each.products for name, each in models.items()},
        "kept": {name: each.blocks for name, each in models.items() if each.blocks},
        "kernels": kernels.report,
        "engines": {name: told | accounts.get(name, {}) for name, told in engines.items() if told},
        "fp8_caches": caches and caches | {"scales": scales},
        "memory": memory_plans(checked.manifest, context.config),
        "exactness": checked.exactness,
    }
