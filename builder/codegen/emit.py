"""How a fused graph gets into the bundle: lowered for the backend, and compiled where the backend has engines."""

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
from specbuild.builder.passes.pattern import dims, renamed
from specbuild.builder.quantize.fp8_caches import Scales
from specbuild.runtime.backends.gpu.plan import PLUGIN_VERSION
from specbuild.runtime.bundle.manifest import EngineRecord

from .engine_layers import describe
from .tensorrt import Progress, built_on, compile_engine, profiles_of

WEIGHTS, GRAPH, PLAN = "weights.bin", "model.onnx", "model.plan"
INLINE_BYTES = 1024  # smaller tensors stay in the graph file
Stored = dict[str, ir.ExternalTensor]  # by content


@dataclass(frozen=True, slots=True)
class Caches:
    """The rows that a slot has, the longest text among them, and the scales over FP8 ones, which the plugin has."""

    capacity: int
    max_seq_len: int
    scales: Scales | None = None


@dataclass(frozen=True, slots=True)
class Emitted:
    """What was written: graph or plan by the batch size it serves, plans' records, and what the report says of them.

    `stored`: the tensors that lie there now, of models that share a folder.
    """

    graphs: dict[str, str]
    lowered: dict[str, int]  # operators
    engines: dict[str, EngineRecord] = field(default_factory=dict)
    report: dict[str, Any] | None = None
    stored: Stored | None = None


def lowering(config: BuildConfig) -> ModuleType:
    """The module that lowers for the asked backend."""
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
    """Write one model to `folder / name`, and compile it where the backend has engines.

    stored: tensors of the models before it, with which it shares a folder; None: it shares none. Raises OptionError
    and ExecutionError as `compile_engine` does.
    """
    if not config.descriptor.on_gpu:
        return _lanes(folder, name, graph, config, caches.capacity, stored)
    (folder / name).mkdir(parents=True)
    of_plugin = (caches.scales, config.engine.block_size) if config.plugin else ()
    lowered = lowering(config).lower(graph, config.dtype_of(name), caches.capacity, *of_plugin)
    census, profiles = passes.census(lowered), profiles_of(config, caches.max_seq_len)
    activations = max(
        activation_bytes(lowered, {d: largest for d, (_, _, largest) in p.sizes.items()}) for p in profiles
    )
    layers = sum(str(value.name).startswith("past_key") for value in lowered.graph.inputs)
    dynamic = sorted({d for value in lowered.graph.inputs for d in dims(value) or () if isinstance(d, str)})
    file = folder / name / GRAPH
    ir.save(lowered, file, external_data=WEIGHTS)
    del lowered
    if not config.descriptor.compiles:
        return Emitted({str(config.max_batch_size): f"{name}/{GRAPH}"}, census)
    engine = compile_engine(file, config.backend, profiles, config.engine, progress)
    plan = f"{name}/{PLAN}"
    (folder / plan).write_bytes(engine.plan)
    for path in (file, folder / name / WEIGHTS):
        path.unlink(missing_ok=True)
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


def activation_bytes(graph: ir.Model, sizes: Mapping[str, int]) -> int:
    """An estimate, for these sizes of the dynamic dimensions: twice what the largest operator reads and writes."""

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


def _lanes(
    folder: Path, name: str, graph: ir.Model, config: BuildConfig, capacity: int, stored: Stored | None
) -> Emitted:
    """ONNX Runtime on a CPU: one graph file per batch size beside one file of weights.

    A draft that has weights of the target's lies in the target's folder, beyond which no graph may read, and what both
    have is stored once.
    """
    shares, stored = stored is not None, dict(stored or {})
    own = shares and name == "draft"
    place, prefix, weights = ("target", "draft-", f"draft-{WEIGHTS}") if own else (name, "", WEIGHTS)
    (folder / place).mkdir(parents=True, exist_ok=own)
    for value in graph.graph.initializers.values():  # what stays in the graph file is in memory before
        if isinstance(small := value.const_value, ir.ExternalTensor) and small.nbytes < INLINE_BYTES:
            (value.const_value,) = ir.external_data.convert_tensors_from_external([small])
    large = [v for v in graph.graph.initializers.values() if v.const_value and v.const_value.nbytes >= INLINE_BYTES]
    keys = {v: _content(v.const_value) for v in large} if shares else {}  # type: ignore[arg-type]
    new = [v for v in large if keys.get(v) not in stored]
    values = [v.const_value for v in new]
    written = ir.external_data.convert_tensors_to_external(values, folder / place, weights)  # type: ignore[arg-type]
    for value, tensor in zip(new, written, strict=True):
        value.const_value = tensor
        if keys:
            stored[keys[value]] = tensor
    for value in large:
        if value not in new:
            value.const_value = renamed(stored[keys[value]], str(value.name))
    graphs, census = dict[str, str](), dict[str, int]()
    for batch_size in config.batch_sizes:
        graphs[str(batch_size)] = file = f"{place}/{prefix}batch{batch_size}.onnx"
        lowered = lowering(config).lower(graph, batch_size, capacity)
        census = census or passes.census(lowered)
        ir.save(lowered, folder / file)
    return Emitted(graphs, census, stored=stored if shares else None)


def _content(tensor: ir.TensorProtocol) -> str:
    """What tells tensors apart: type, shape and bytes."""
    return hashlib.sha256(f"{tensor.dtype} {tensor.shape}".encode() + tensor.tobytes()).hexdigest()
