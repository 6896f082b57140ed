"""Compiles one model from its checkpoint into the bundle, stage by stage."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import onnx_ir as ir

from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.manifest import ModelRecord

from . import passes
from .build_context import BuildContext
from .candidates import Candidates
from .check.bundle_check import check_texts
from .check.graph_check import GraphCheck, check_graph
from .codegen.emit import Caches, Emitted, Stored, emit, lowering
from .codegen.products import count
from .config.build_config import BuildConfig
from .config.quantize_options import chooses
from .config.scheme import Scheme
from .frontend.checkpoint import Checkpoint
from .frontend.export import export
from .frontend.layer_by_layer import LayeredModel
from .frontend.logits_file import LOWEST
from .lower.plugin import PAGED
from .model_loading import LoadedModel, columns_of, load_draft, load_target, save_tokens, unspread
from .passes.spread_logits import spread_logits
from .quantize.assignment import assign, experts_scheme
from .quantize.calibrate import calibrate as calibrate_weights
from .quantize.experts import QuantizeExperts
from .quantize.fp8_caches import Scales, calibrate
from .quantize.linears import Names
from .quantize.numbers import Numbers
from .quantize.own_blocks import OwnBlocks, block_report, own_blocks
from .quantize.quality import Before
from .quantize.rewrite import Quantize, check_products
from .quantize.stage import Quantization, Request, quantize_model
from .quantize.texts import Texts


@dataclass(frozen=True, slots=True)
class Prepared:
    """A portable graph after its passes, and what quantizes it.

    Attributes:
        graph: The graph, with float32 weights.
        matched: How often each pass matched.
        operators: How many of each operator there were, "exported" and "fused".
        scales: Scales of FP8 caches.
        quantization: Quantized weights, which are not in the graph yet.
        blocks: Weights that stay in their file's blocks, by name.
    """

    graph: ir.Model
    matched: dict[str, int]
    operators: dict[str, dict[str, int]]
    scales: Scales | None
    quantization: Quantization | None
    blocks: dict[str, OwnBlocks]

    @property
    def numbers(self) -> Mapping[str, Numbers]:
        """All weights that get other numbers than float32's, by name."""
        return self.quantization.numbers if self.quantization else self.blocks


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
        blocks: The report's entry on weights in their file's blocks, if they stay so.
    """

    name: str
    record: ModelRecord
    emitted: Emitted
    matched: dict[str, int]
    operators: dict[str, dict[str, int]]
    products: dict[str, Any]
    scales: Scales | None = None
    quantization: Quantization | None = None
    blocks: dict[str, Any] | None = None

    def with_measured(self, more: dict[str, Any]) -> CompiledModel:
        """Return a copy with further measurements of its quantization, if it is quantized."""
        return replace(self, quantization=self.quantization and self.quantization.with_measured(more))


@dataclass(frozen=True, slots=True)
class CompiledTarget:
    """The target, for a GPU Hugging Face's results on the check's prompts, and the head loaded with it."""

    model: CompiledModel
    references: Before | None
    head: LoadedModel | None = None
    graph: GraphCheck = field(default_factory=GraphCheck)


def compile_target(context: BuildContext, texts: Texts | None) -> CompiledTarget:
    """Compile the target into the bundle.

    Args:
        context: The build.
        texts: Texts to quantize with; None if nothing is quantized.
    """
    target = _target(context, texts)
    _free()
    return target


def compile_draft(context: BuildContext, texts: Texts | None, target: CompiledTarget) -> CompiledModel:
    """Compile the draft or head into the bundle.

    Args:
        context: The build.
        texts: Texts to quantize with; None if nothing is quantized.
        target: The compiled target, whose head and weights the draft may share.
    """
    draft = _draft(context, texts, target)
    _free()
    return draft


def _target(context: BuildContext, texts: Texts | None) -> CompiledTarget:
    source = context.source
    with context.stage("target: load"):
        loaded = load_target(source)
    references = _references(context, loaded) if context.config.descriptor.on_gpu else None
    prepared = _prepared(context, loaded, references, texts, None)
    model = _lowered(context, loaded, prepared, Stored() if source.shares_weights else None)
    if references is None:
        return CompiledTarget(model, None, loaded.head)
    with context.stage("target: graph against Hugging Face"):
        dtype, narrow = context.config.dtype_of("target"), (prepared.quantization, prepared.scales)
        layered = _layered(context, loaded)
        checked = check_graph(prepared.graph, context.capacity, layered, dtype, references, *narrow)
    return CompiledTarget(model.with_measured(checked.moved), references, loaded.head, checked)


def _references(context: BuildContext, loaded: LoadedModel) -> Before:
    """Return what Hugging Face makes of the check's texts, for a graph that this machine may not run."""
    with context.stage("target: Hugging Face reference"):
        texts = check_texts(context.source.target.tokenizer, context.source.max_seq_len)
        return Before(texts, _layered(context, loaded).logits(texts))


def _draft(context: BuildContext, texts: Texts | None, target: CompiledTarget) -> CompiledModel:
    with context.stage("draft: load"):
        loaded = target.head or load_draft(context.source)
    prepared = _prepared(context, loaded, target.references, texts, target.model.quantization)
    return _lowered(context, loaded, prepared, target.model.emitted.stored)


def _prepared(
    context: BuildContext,
    loaded: LoadedModel,
    references: Before | None,
    texts: Texts | None,
    target: Quantization | None,
) -> Prepared:
    """Export and fuse a model's graph, and quantize its weights; a CPU's draft alone keeps logits of some tokens."""
    source, name, scales = context.source, loaded.name, None
    if references and context.config.engine.kv_cache_dtype == "fp8":
        with context.stage(f"{name}: calibrate"):
            scales = calibrate(_layered(context, loaded), references.texts)
    keeps, scheme = context.config.keeps(name), context.config.scheme_of(name)
    blocks = own_blocks(loaded.weights, Names.of(loaded.net), scheme.activations) if scheme and keeps else {}
    with context.stage(f"{name}: export"):
        layout, shape = source.layouts[name], (source.max_seq_len, context.capacity)
        graph = export(loaded.net, layout, *shape, loaded.taps, loaded.weights)
        operators = {"exported": passes.census(graph)}
        matched = passes.run_portable(graph, {f"{key}.weight": each.scheme for key, each in blocks.items()})
        operators["fused"] = passes.census(graph)
        if loaded.tokens and unspread(context, loaded) is None:
            spread_logits(graph.graph, loaded.tokens, source.target.token_rows, LOWEST)
    quantization = None if keeps else _quantization(context, loaded, graph, texts, target)
    return Prepared(graph, matched, operators, scales, quantization, blocks)


def _quantization(
    context: BuildContext, loaded: LoadedModel, graph: ir.Model, texts: Texts | None, target: Quantization | None
) -> Quantization | None:
    """Quantize a model's weights, after noting what it computes on held-out texts; the graph is not changed.

    A draft is judged by the target's choices. None if nothing is quantized, and for a head, which never is.
    """
    name, checkpoint = loaded.name, context.source.models[loaded.name]
    if texts is None or not isinstance(checkpoint, Checkpoint):
        return None
    with context.stage(f"{name}: quantize"):
        request, names, schemes = _quantization_request(context, loaded, texts)
        check_products(graph, schemes)
        model = _layered(context, loaded)
        request = replace(request, comparing=Candidates(context, model, graph, names).best)
        before = Before.of(model, texts.held_out)
        exact = target.before if target else before
        identity, detail = checkpoint.sha256(), context.stages.detail
        return quantize_model(model, request, names, schemes, before, exact, identity, detail)


def _quantization_request(
    context: BuildContext, loaded: LoadedModel, texts: Texts
) -> tuple[Request, Names, dict[str, Scheme]]:
    """Return the quantization request for a model, its weights' names, and their schemes."""
    config, name = context.config, loaded.name
    names = Names.of(loaded.net)  # its configuration may be wrong about a tied head, the loaded model is not
    precision, item = config.precision_of(name), memory_plan.item_bytes(config.dtype_of(name))
    request = Request(name, precision, config.backend, config.quantize, texts, config.max_kl, item)
    return request, names, assign(config.quantize, name, precision, config.backend, names)


def _lowered(context: BuildContext, loaded: LoadedModel, prepared: Prepared, stored: Stored | None) -> CompiledModel:
    """Emit a model's graph with its quantized weights."""
    config, name, graph = context.config, loaded.name, prepared.graph
    quantization, scales = prepared.quantization, prepared.scales
    with context.stage(f"{name}: lower"):
        by_name = _head_numbers(config, loaded) if loaded.is_head else prepared.numbers
        matched = prepared.matched | _rewrite(graph, by_name, Names.of(loaded.net)) if by_name else prepared.matched
        if scheme := experts_scheme(config, name):
            QuantizeExperts(scheme)(graph)
            passes.clean(graph)
        precision = _precision(config, name, by_name)
        products = asdict(count(graph, memory_plan.item_bytes(precision)))
        caches = Caches(context.capacity, context.source.max_seq_len, scales)
        emitted = emit(context.folder, name, graph, config, caches, context.stages.detail, stored)
    record = _record(context, loaded, precision, emitted)
    operators = prepared.operators | {"lowered": emitted.lowered}
    blocks = block_report(loaded.weights, prepared.blocks) if prepared.blocks else None
    return CompiledModel(name, record, emitted, matched, operators, products, scales, quantization, blocks)


def _head_numbers(config: BuildConfig, head: LoadedModel) -> Mapping[str, Numbers]:
    """Return a head's quantized weights, rounded to nearest: no text calibrates what reads hidden states."""
    scheme = experts_scheme(config, head.name)
    if scheme is None:
        return {}
    schemes = assign(config.quantize, head.name, str(scheme), config.backend, Names.of(head.net))
    return calibrate_weights(head.layered(0), {name: each.to_nearest for name, each in schemes.items()}, ())


def _rewrite(graph: ir.Model, by_name: Mapping[str, Numbers], names: Names) -> dict[str, int]:
    """Put quantized weights into the graph; return how often the pass matched, by its name."""
    quantizer = Quantize(by_name, names)
    quantizer(graph)
    passes.clean(graph)
    return {type(quantizer).__name__: quantizer.matched}


def _precision(config: BuildConfig, name: str, quantized: Mapping[str, Numbers]) -> str:
    """Return the name of a model's precision, as the manifest has it."""
    dtype, precision, scheme = config.dtype_of(name), config.precision_of(name), config.scheme_of(name)
    if not (quantized or config.keeps(name)):
        return dtype
    if config.keeps(name):
        label = str(scheme)
    else:
        label = precision if chooses(precision) or (scheme and scheme.quantized) else "mixed"
    return label if dtype == "fp32" or "/" in label else f"{label}/{dtype}"


def _record(context: BuildContext, loaded: LoadedModel, precision: str, emitted: Emitted) -> ModelRecord:
    """Return a model's record for the manifest."""
    config, source, drafts = context.config, context.source, loaded.name == "draft"
    checkpoint, layout, lowered_by = source.models[loaded.name], source.layouts[loaded.name], lowering(config)
    vocabulary = source.vocabulary
    reads = {"hidden": "hidden_in"} if loaded.is_head else {}
    return ModelRecord(
        source=checkpoint.source,
        source_sha256=checkpoint.sha256(),
        architecture=checkpoint.architecture,
        parameters=loaded.parameters,
        precision=precision,
        **layout.record,
        vocab_size=columns_of(context, loaded),
        capacity=context.capacity,
        max_positions=checkpoint.max_positions,
        graphs=emitted.graphs,
        inputs=lowered_by.INPUTS | (PAGED if config.engine.block_size else {}) | reads,
        outputs=lowered_by.OUTPUTS | ({"hidden": "hidden"} if loaded.hidden else {}),
        kind=source.kind if drafts else "model",
        hidden=loaded.hidden,
        mask_token=vocabulary.mask_token if drafts and vocabulary else None,
        tokens=save_tokens(context.folder, unspread(context, loaded)),
    )


def runs_quantized(config: BuildConfig, quantization: Quantization | None) -> bool:
    """Return whether a model is quantized and runs on a CPU, so that its divergence is measured there."""
    return bool(quantization and quantization.numbers) and not config.descriptor.on_gpu


def _free() -> None:
    """Free the memory that a model was compiled in."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps what was freed
        trim(0)


def _layered(context: BuildContext, loaded: LoadedModel) -> LayeredModel:
    return loaded.layered(context.source.target.token_rows)
