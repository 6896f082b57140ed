"""Compiles one model from its checkpoint into the bundle, stage by stage."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx_ir as ir

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.manifest import ModelRecord

from . import passes
from .build_context import BuildContext
from .candidates import Candidates
from .check.bundle_check import tokenize
from .check.graph_check import GraphCheck, check_graph
from .check.step_times import PLAIN, save_plain, step_times
from .codegen.emit import Caches, Emitted, Stored, emit, lowering
from .codegen.products import count
from .config.build_config import BuildConfig
from .config.quantize_options import chooses
from .config.scheme import KEEP, Scheme
from .frontend.checkpoint import Checkpoint
from .frontend.eagle3_head import EagleHead
from .frontend.export import export
from .frontend.reference import References
from .frontend.vocabulary import by_token
from .lower.plugin import PAGED
from .model_loading import LoadedModel, columns_of, load_draft, load_target, save_tokens, unspread
from .passes.spread_logits import spread_logits
from .prepare import needs_whole
from .quantize.assignment import assign
from .quantize.fp8_caches import Scales, calibrate
from .quantize.linears import Names
from .quantize.own_blocks import Kept, Numbers, own_blocks, told
from .quantize.quality import Before
from .quantize.rewrite import Quantize, check_products
from .quantize.stage import Quantization, Request, check_early, quantize_model
from .quantize.texts import Texts


@dataclass(frozen=True, slots=True)
class Prepared:
    """A portable graph after its passes, and what quantizes it.

    Attributes:
        graph: The graph, with float32 weights.
        matched: How often each pass matched.
        operators: How many of each operator there were, "exported" and "fused".
        scales: Scales of FP8 caches.
        numbers: Quantized weights, which are not in the graph yet.
        kept: Weights that stay in their file's blocks, by name.
    """

    graph: ir.Model
    matched: dict[str, int]
    operators: dict[str, dict[str, int]]
    scales: Scales | None
    numbers: Quantization | None
    kept: dict[str, Kept]


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """A model in the bundle, and what the report says of it.

    Attributes:
        name: "target" or "draft".
        record: Its record in the manifest.
        emitted: Its files.
        matched: How often each pass matched.
        operators: How many of each operator there were, "exported", "fused" and "lowered".
        products: The products that a step computes.
        scales: Scales of its FP8 caches.
        quantization: Its quantized weights, and what they cost.
        kept: The report's entry on weights in their file's blocks, if they stay so.
    """

    name: str
    record: ModelRecord
    emitted: Emitted
    matched: dict[str, int]
    operators: dict[str, dict[str, int]]
    products: dict[str, Any]
    scales: Scales | None = None
    quantization: Quantization | None = None
    kept: dict[str, Any] | None = None

    def with_measured(self, more: dict[str, Any]) -> CompiledModel:
        """Return a copy with further measurements of its quantization, if it is quantized."""
        return replace(self, quantization=self.quantization and self.quantization.with_measured(more))


@dataclass(frozen=True, slots=True)
class CompiledTarget:
    """The target, for a GPU Hugging Face's results on the check's prompts, and the EAGLE-3 head loaded with it."""

    model: CompiledModel
    references: References | None
    head: EagleHead | None = None
    graph: GraphCheck = field(default_factory=GraphCheck)


def compile_target(context: BuildContext, texts: Texts | None) -> CompiledTarget:
    """Compile the target into the bundle.

    Args:
        context: The build.
        texts: Texts to quantize with; None if nothing is quantized.
    """
    with TemporaryDirectory() as scratch:
        target = _target(context, texts, Path(scratch))
        return replace(target, model=_timed(context, target.model, Path(scratch)))


def compile_draft(context: BuildContext, texts: Texts | None, target: CompiledTarget) -> CompiledModel:
    """Compile the draft or head into the bundle.

    Args:
        context: The build.
        texts: Texts to quantize with; None if nothing is quantized.
        target: The compiled target, whose head and weights the draft may share.
    """
    with TemporaryDirectory() as scratch:
        return _timed(context, _draft(context, texts, target, Path(scratch)), Path(scratch))


def _target(context: BuildContext, texts: Texts | None, scratch: Path) -> CompiledTarget:
    source = context.source
    with context.stage("target: load"):
        loaded = load_target(source, needs_whole(context.config, "target"))
        if texts is not None:  # fail here rather than after minutes of calibration
            check_early(loaded.net, *_asked(context, loaded, texts))
    references = _references(context, loaded) if context.config.descriptor.on_gpu else None
    prepared = _prepared(context, loaded, references, texts, None)
    model = _lowered(context, loaded, prepared, scratch, Stored() if source.shares_weights else None)
    if references is None:
        return CompiledTarget(model, None, loaded.head)
    with context.stage("target: graph against Hugging Face"):
        dtype, graph, found = context.config.dtype_of("target"), prepared.graph, (prepared.numbers, prepared.scales)
        with by_token(loaded.net, loaded.tokens, source.target.token_rows):
            checked = check_graph(graph, context.capacity, loaded.net, dtype, references, *found)
    return CompiledTarget(model.with_measured(checked.moved), references, loaded.head, checked)


def _references(context: BuildContext, loaded: LoadedModel) -> References:
    """Return what Hugging Face makes of the check's prompts, for a graph that this machine may not run."""
    target = context.source.target
    with context.stage("target: Hugging Face reference"):
        prompts, new_tokens = tokenize(target.tokenizer, context.source.max_seq_len)
        with by_token(loaded.net, loaded.tokens, target.token_rows):
            return References.of(loaded.net, prompts, new_tokens, target.eos_token_ids())


def _draft(context: BuildContext, texts: Texts | None, target: CompiledTarget, scratch: Path) -> CompiledModel:
    with context.stage("draft: load"):
        loaded = load_draft(context.source, target.head, needs_whole(context.config, "draft"))
    prepared = _prepared(context, loaded, target.references, texts, target.model.quantization)
    return _lowered(context, loaded, prepared, scratch, target.model.emitted.stored)


def _prepared(
    context: BuildContext,
    loaded: LoadedModel,
    references: References | None,
    texts: Texts | None,
    target: Quantization | None,
) -> Prepared:
    """Export and fuse a model's graph, and quantize its weights; a CPU's draft alone keeps logits of some tokens."""
    source, name, scales = context.source, loaded.name, None
    if references and context.config.engine.kv_cache_dtype == "fp8":
        with context.stage(f"{name}: calibrate"):
            scales = calibrate(loaded.net, references.texts)
    keeps = context.config.precision_of(name) == KEEP
    kept = own_blocks(loaded.weights, Names.of(loaded.net)) if keeps else {}
    with context.stage(f"{name}: export"):
        layout, shape = source.layouts[name], (source.max_seq_len, context.capacity)
        graph = export(loaded.net, layout, *shape, loaded.taps, loaded.weights)
        operators = {"exported": passes.census(graph)}
        matched = passes.run_portable(graph, {f"{key}.weight": each.scheme for key, each in kept.items()})
        operators["fused"] = passes.census(graph)
        if loaded.tokens and unspread(context, loaded) is None:
            spread_logits(graph.graph, loaded.tokens, source.target.token_rows)
    numbers = None if keeps else _numbers(context, loaded, graph, texts, target)
    return Prepared(graph, matched, operators, scales, numbers, kept)


def _numbers(
    context: BuildContext, loaded: LoadedModel, graph: ir.Model, texts: Texts | None, target: Quantization | None
) -> Quantization | None:
    """Quantize a model's weights, after noting what it computes on held-out texts; the graph is not changed.

    A draft is judged by the target's continuations. None if nothing is quantized, and for a head, which never is.
    """
    name, checkpoint = loaded.name, context.source.models[loaded.name]
    if texts is None or not isinstance(checkpoint, Checkpoint):
        return None
    with context.stage(f"{name}: quantize"), by_token(loaded.net, loaded.tokens, context.source.target.token_rows):
        request, names, schemes = _asked(context, loaded, texts)
        check_products(graph, schemes)
        request = replace(request, comparing=Candidates(context, loaded, graph, names).best)
        before = Before.of(loaded.net, texts.held_out, checkpoint.eos_token_ids(), context.source.max_seq_len)
        judged_by = (target.before if target else before).greedy
        identity, detail = checkpoint.sha256(), context.stages.detail
        return quantize_model(loaded.net, request, names, schemes, before, judged_by, identity, detail)


def _asked(context: BuildContext, loaded: LoadedModel, texts: Texts) -> tuple[Request, Names, dict[str, Scheme]]:
    """Return the quantization request for a model, its weights' names, and their schemes."""
    config, name = context.config, loaded.name
    names = Names.of(loaded.net)  # its configuration may be wrong about a tied head, the loaded model is not
    precision, item = config.precision_of(name), memory_plan.item_bytes(config.dtype_of(name))
    request = Request(name, precision, config.backend, config.quantize, texts, config.max_kl, item)
    return request, names, assign(config.quantize, name, precision, config.backend, names)


def _lowered(
    context: BuildContext, loaded: LoadedModel, prepared: Prepared, scratch: Path, stored: Stored | None
) -> CompiledModel:
    """Emit a model's graph with its quantized weights; if its steps are timed, save the float32 graph to `scratch`."""
    config, name, graph = context.config, loaded.name, prepared.graph
    numbers, scales = prepared.numbers, prepared.scales
    with context.stage(f"{name}: lower"):
        if runs_quantized(config, numbers):
            save_plain(graph, context.capacity, scratch)
        found: Mapping[str, Numbers] = numbers.found if numbers else prepared.kept
        matched = prepared.matched | _rewrite(graph, found, Names.of(loaded.net)) if found else prepared.matched
        precision = _precision(config, name, numbers)
        products = asdict(count(graph, memory_plan.item_bytes(precision)))
        caches = Caches(context.capacity, context.source.max_seq_len, scales)
        emitted = emit(context.folder, name, graph, config, caches, context.stages.detail, stored)
    record = _record(context, loaded, precision, emitted)
    operators = prepared.operators | {"lowered": emitted.lowered}
    kept = told(loaded.weights, prepared.kept) if prepared.kept else None
    return CompiledModel(name, record, emitted, matched, operators, products, scales, numbers, kept)


def _rewrite(graph: ir.Model, found: Mapping[str, Numbers], names: Names) -> dict[str, int]:
    """Put quantized weights into the graph; return how often the pass matched, by its name."""
    quantizer = Quantize(found, names)
    quantizer(graph)
    passes.clean(graph)
    return {type(quantizer).__name__: quantizer.matched}


def _precision(config: BuildConfig, name: str, numbers: Quantization | None) -> str:
    """Return the name of a model's precision, as the manifest has it."""
    dtype, asked, scheme = config.dtype_of(name), config.precision_of(name), config.scheme_of(name)
    if asked == KEEP:
        return KEEP
    if not numbers or not numbers.found:
        return dtype
    called = asked if chooses(asked) or (scheme and scheme.quantized) else "mixed"
    return called if dtype == "fp32" or "/" in called else f"{called}/{dtype}"


def _record(context: BuildContext, loaded: LoadedModel, precision: str, emitted: Emitted) -> ModelRecord:
    """Return a model's record for the manifest."""
    config, source, drafts = context.config, context.source, loaded.name == "draft"
    checkpoint, layout, lowered_by = source.models[loaded.name], source.layouts[loaded.name], lowering(config)
    vocabulary = source.vocabulary
    reads = {"hidden": "hidden_in"} if loaded.head and drafts else {}
    return ModelRecord(
        source=checkpoint.source,
        source_sha256=checkpoint.sha256(),
        architecture=checkpoint.architecture,
        parameters=loaded.parameters,
        precision=precision,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        windows=sorted(set(layout.windows)),
        vocab_size=columns_of(context, loaded),
        capacity=context.capacity,
        max_positions=checkpoint.max_positions,
        graphs=emitted.graphs,
        inputs=lowered_by.INPUTS | (PAGED if config.engine.block_size else {}) | reads,
        outputs=lowered_by.OUTPUTS | ({"hidden": "hidden"} if loaded.head else {}),
        kind=source.kind if drafts else "model",
        hidden=loaded.head.config.hidden_size if loaded.head else 0,
        mask_token=vocabulary.mask_token if drafts and vocabulary else None,
        tokens=save_tokens(context.folder, unspread(context, loaded)),
    )


def runs_quantized(config: BuildConfig, numbers: Quantization | None) -> bool:
    """Return whether a model is quantized and runs on a CPU, so that its steps are timed next to float32's."""
    return bool(numbers and numbers.found) and not config.descriptor.on_gpu


def _timed(context: BuildContext, model: CompiledModel, scratch: Path) -> CompiledModel:
    """Free the memory that a model was compiled in, then return it with its step times, if those are measured."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what was freed
        trim(0)
    if not runs_quantized(context.config, model.quantization):
        return model
    with context.stage(f"{model.name}: steps"):
        graphs = {"quantized": context.folder / model.emitted.graphs["1"], "float32": scratch / PLAIN}
        largest = context.config.buckets[-1]
        return model.with_measured({"steps": step_times(graphs, _spec(model, largest), largest)})


def _spec(model: CompiledModel, largest: int) -> ModelSpec:
    """Return the executor's specification of a model emitted for a CPU, with at most `largest` nodes per step."""
    record = model.record
    shape = record.layers, record.kv_heads, record.head_dim, record.vocab_size, record.capacity
    return ModelSpec(model.name, *shape, largest, tuple(record.windows), hidden=record.hidden)
