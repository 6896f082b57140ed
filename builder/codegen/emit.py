"""Writes a fused graph into the bundle: lowers it for the backend, and compiles it if the backend has engines."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx_ir as ir

from specbuild.builder import passes
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.progress import Progress
from specbuild.builder.passes.pattern import counted, dims, renamed, save
from specbuild.builder.quantize.fp8_caches import Scales
from specbuild.runtime.backends.kernels.library import PLUGIN_VERSION
from specbuild.runtime.bundle.manifest import EngineRecord

from . import nvrtc
from .engine_layers import describe
from .parts import WEIGHTS, save_parts
from .tensorrt import built_on, compile_engine, profiles_of

GRAPH, PLAN = "model.onnx", "model.plan"
PAGE = 4096  # large tensors begin there: the runtime computes with the mapped file
INLINE_BYTES = 1024  # smaller tensors stay in the graph file
Stored = dict[str, ir.ExternalTensor]  # tensors in weight files, by a hash of their content


@dataclass(frozen=True, slots=True)
class Caches:
    """The size of a model's KV caches.

    Attributes:
        capacity: Cache rows per slot.
        max_seq_len: The longest text, in tokens.
        scales: Scales of FP8 caches, which only the plugin supports.
    """

    capacity: int
    max_seq_len: int
    scales: Scales | None = None


@dataclass(frozen=True, slots=True)
class Emitted:
    """The files written for one model.

    Attributes:
        graphs: The graph or plan for each batch size.
        lowered: How many of each operator the lowered graph has.
        engines: Records of the plans, by file.
        report: The report's entry on the engine.
        stored: The tensors in the weight files so far, for models that share a folder.
        products: The kernels of its products with weights in blocks.
    """

    graphs: dict[str, str]
    lowered: dict[str, int]
    engines: dict[str, EngineRecord] = field(default_factory=dict)
    report: dict[str, Any] | None = None
    stored: Stored | None = None
    products: frozenset[nvrtc.Product] = frozenset()


def lowering(config: BuildConfig) -> ModuleType:
    """Return the module that lowers for the configured backend and attention."""
    backend = config.descriptor
    native = None if config.plugin else backend.native_lowering
    return importlib.import_module(f"specbuild.builder.lower.{native or backend.lowering}")


def emit(
    folder: Path,
    name: str,
    graph: ir.Model,
    config: BuildConfig,
    caches: Caches,
    progress: Progress = lambda phase, share: None,
    stored: Stored | None = None,
) -> Emitted:
    """Write one model into the bundle, and compile it if the backend has engines.

    Args:
        folder: The bundle.
        name: "target" or "draft".
        graph: The fused graph.
        config: The build's options.
        caches: The size of its caches.
        progress: Called while weights are written or an engine is compiled, with the phase and its share that is done.
        stored: Tensors of the models before it that share a folder with it; None if it shares none.

    Raises:
        OptionError: As `compile_engine` does.
        ExecutionError: As `compile_engine` does.
    """
    if not config.descriptor.on_gpu:
        return _flat(folder, name, graph, config, caches.capacity, stored, progress)
    (folder / name).mkdir(parents=True)
    of_plugin = (caches.scales, config.engine.block_size) if config.plugin else ()
    lowered = lowering(config).lower(graph, config.dtype_of(name), caches.capacity, *of_plugin)
    census, profiles = passes.census(lowered), profiles_of(config, caches.max_seq_len)
    activations = max(
        activation_bytes(lowered, {d: largest for d, (_, _, largest) in p.sizes.items()}) for p in profiles
    )
    layers = sum(str(value.name).startswith("past_key") for value in lowered.graph.inputs)
    dynamic = sorted({d for value in lowered.graph.inputs for d in dims(value) or () if isinstance(d, str)})
    if config.plugin and not config.descriptor.compiles:
        file_of_parts = save_parts(folder, name, lowered, progress)
        return Emitted({str(config.max_batch_size): file_of_parts}, census, products=products_of(lowered, config, name))
    file = folder / name / GRAPH
    save(lowered, file, WEIGHTS, progress)
    del lowered
    if not config.descriptor.compiles:
        return Emitted({str(config.max_batch_size): f"{name}/{GRAPH}"}, census)
    engine = compile_engine(file, config.backend, profiles, config.engine, progress)
    plan = f"{name}/{PLAN}"
    (folder / plan).write_bytes(engine.plan)
    file.unlink()
    (folder / name / WEIGHTS).unlink(missing_ok=True)
    record = EngineRecord(
        version=engine.version,
        architectures=list(config.engine.targets or built_on(config.backend)),
        attention="plugin" if config.plugin else "native",
        plugin=PLUGIN_VERSION if config.plugin else None,
        version_compatible=config.engine.version_compatible,
        hardware_compatible=config.engine.hardware_compatible,
        activations=activations,
        profiles={p.name: {d: list(p.sizes[d]) for d in dynamic} for p in profiles},
        kv_cache_dtype=config.engine.kv_cache_dtype,
        block_size=config.engine.block_size,
    )
    return Emitted({str(config.max_batch_size): plan}, census, {plan: record}, describe(engine.layers, layers))


def products_of(lowered: ir.Model, config: BuildConfig, name: str) -> frozenset[nvrtc.Product]:
    """Return which kernels a lowered graph's products with weights in blocks need."""
    dtype = config.dtype_of(name).upper().replace("FP", "F")
    products = [node for node in lowered.graph if node.op_type == "BlockProduct"]
    return frozenset(nvrtc.Product(dtype, node.attributes["bits"].as_int()) for node in products)


def activation_bytes(graph: ir.Model, sizes: Mapping[str, int]) -> int:
    """Estimate a graph's activations in bytes, for these sizes of its dynamic dimensions.

    They are taken as twice what the largest operator reads and writes, apart from weights, graph inputs and caches.
    """

    caches = {output.name for output in graph.graph.outputs if output.name != "logits"}

    def bytes_of(value: ir.Value | None) -> int:
        shape = dims(value)
        if value is None or shape is None or value.dtype is None or value.name in caches:
            return 0
        if value.is_initializer() or value.is_graph_input():
            return 0
        each = [dim if isinstance(dim, int) else sizes.get(dim, 0) for dim in shape]
        return math.prod(each) * math.ceil(value.dtype.itemsize)

    return 2 * max(sum(map(bytes_of, {*node.inputs, *node.outputs})) for node in graph.graph)


def _flat(
    folder: Path,
    name: str,
    graph: ir.Model,
    config: BuildConfig,
    capacity: int,
    stored: Stored | None,
    progress: Progress,
) -> Emitted:
    """Write a model for ONNX Runtime on a CPU: one graph file for all batch sizes, beside one file of weights.

    A draft that shares weights with the target is written to the target's folder, because a graph may not read files
    outside its own folder; shared tensors are stored once.
    """
    lower, graph = lowering(config), graph.clone()
    lower.pack(graph)
    shares, stored = stored is not None, dict(stored or {})
    own = shares and name == "draft"
    place, prefix, weights = ("target", "draft-", f"draft-{WEIGHTS}") if own else (name, "", WEIGHTS)
    (folder / place).mkdir(parents=True, exist_ok=own)
    for value in graph.graph.initializers.values():  # load what stays in the graph file
        if isinstance(small := value.const_value, ir.ExternalTensor) and small.nbytes < INLINE_BYTES:
            (value.const_value,) = ir.external_data.convert_tensors_from_external([small])
    large = [v for v in graph.graph.initializers.values() if v.const_value and v.const_value.nbytes >= INLINE_BYTES]
    keys = {v: _content(v.const_value) for v in large} if shares else {}  # type: ignore[arg-type]
    new = [v for v in large if keys.get(v) not in stored]
    values = [v.const_value for v in new]
    written = ir.external_data.convert_tensors_to_external(
        values,  # type: ignore[arg-type]
        folder / place,
        weights,
        callback=counted(values, progress),  # type: ignore[arg-type]
        alignment=PAGE,
    )
    for value, tensor in zip(new, written, strict=True):
        value.const_value = tensor
        if keys:
            stored[keys[value]] = tensor
    for value in large:
        if value not in new:
            value.const_value = renamed(stored[keys[value]], str(value.name))
    lowered, file = lower.lower(graph, capacity), f"{place}/{prefix}{GRAPH}"
    save(lowered, folder / file)
    graphs = dict.fromkeys(map(str, config.batch_sizes), file)
    return Emitted(graphs, passes.census(lowered), stored=stored if shares else None)


def _content(tensor: ir.TensorProtocol) -> str:
    """Return a hash of a tensor's type, shape and bytes, which is the same for identical tensors."""
    return hashlib.sha256(f"{tensor.dtype} {tensor.shape}".encode() + tensor.tobytes()).hexdigest()
