"""Compiles ONNX with TensorRT: one path for `tensorrt` and `tensorrt-rtx`, whose Python modules have the same API.

Networks are strongly typed: the graph states every type. TensorRT's errors are kept, and the first one becomes the
reason of a failure, with the node's name if the parser knows it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.engine_options import FP8_FROM, HARDWARE, EngineOptions
from specbuild.builder.config.progress import Progress
from specbuild.runtime.backends.gpu.device import MAX_NODES
from specbuild.runtime.backends.tensorrt.plan import load_plugin, logger, verbose
from specbuild.runtime.bundle.atomic_output import write
from specbuild.runtime.bundle.backend import BACKENDS
from specbuild.runtime.errors import ExecutionError, OptionError, SpecbuildError, one_line

CHUNK = 512  # nodes of a prefill chunk, by default


@dataclass(frozen=True, slots=True)
class Profile:
    """One optimization profile: the least, usual and largest size of each dynamic dimension, by name."""

    name: str
    sizes: Mapping[str, tuple[int, int, int]]

    def __post_init__(self) -> None:
        for dimension, sizes in self.sizes.items():
            if not 0 <= sizes[0] <= sizes[1] <= sizes[2]:
                raise OptionError(f"profile {self.name!r} has sizes {sizes} for {dimension}: least, usual, largest")


@dataclass(frozen=True, slots=True)
class Engine:
    """A compiled plan, TensorRT's version, and name and type of the parsed network's layers, in order."""

    plan: bytes
    version: str
    layers: list[tuple[str, str]]


def flavour(backend: str) -> Any:
    """Return the Python module of a backend; raise OptionError if it is not installed."""
    try:
        return importlib.import_module(str(BACKENDS[backend].package))
    except ImportError as error:
        raise OptionError(f"{backend} is not installed ({one_line(error)}): pip install {backend}") from None


def make_profiles(buckets: Sequence[int], batch_size: int, chunk: int, pages: int = 1) -> list[Profile]:
    """Return a profile for each bucket, and one for prefill chunks if they may be larger than the buckets.

    The batch is dynamic in all of them, even for a single sequence: if only some fixed it at 1, they would lay out the
    weights differently, and TensorRT-RTX 1.7 would store these once per layout. A prefill chunk is a chain: no tree.

    Args:
        buckets: Node counts of steps, ascending.
        batch_size: The largest batch.
        chunk: The largest prefill chunk, in nodes.
        pages: How many pages paged caches have at most, in every profile.
    """
    batch = (1, 1, max(2, batch_size))
    least, caches = buckets[-1] + 1, {"pages": (1, pages, pages)}
    tree = {n: (n, MAX_NODES, MAX_NODES) for n in buckets}  # of the plugin: a draft's levels form a tree, too
    profiles = [
        Profile(f"nodes{n}", {"batch": batch, "nodes": (n, n, n), "logit_nodes": (n, n, n), "tree": tree[n], **caches})
        for n in buckets
    ]
    if chunk >= least:
        nodes = (least, max(least, chunk // 2), chunk)
        prompt = {"batch": (1, 1, 2), "nodes": nodes, "logit_nodes": (1, 1, 1), "tree": (0, 0, 0), **caches}
        profiles.append(Profile("prompt", prompt))
    return profiles


def profiles_of(config: BuildConfig, max_seq_len: int) -> list[Profile]:
    """Return the profiles of a build's engines."""
    chunk, block = min(config.engine.prompt_chunk or CHUNK, max_seq_len), config.engine.block_size
    pages = 1 + config.max_batch_size * (capacity_of(config, max_seq_len) // block) if block else 1  # one is spare
    return make_profiles(config.buckets, config.max_batch_size, chunk, pages)


def capacity_of(config: BuildConfig, max_seq_len: int) -> int:
    """Return the cache rows per slot: the longest text, and the largest bucket, whose padded nodes are written, too.

    Engines round them up to whole pages and to 64, as TensorRT requires slots at addresses that are multiples of 256.
    """
    rows, unit = max_seq_len + config.buckets[-1], max(64, config.engine.block_size)
    return -(-rows // unit) * unit if config.descriptor.compiles else rows


def check_machine(backend: str, options: EngineOptions, fp8: bool = False) -> None:
    """Raise OptionError if this machine cannot compile as asked, before minutes are spent.

    TensorRT, a GPU that it needs, FP8 on that GPU (with `fp8`) or the timing cache's folder may be missing.
    """
    if not BACKENDS[backend].compiles_here:
        from specbuild.runtime.backends.gpu.cuda import check_driver

        try:
            check_driver()
        except SpecbuildError as error:
            raise OptionError(
                f"{backend} needs a GPU to build, and here {error}; --backend tensorrt-rtx alone needs none"
            ) from None
    flavour(backend)
    if fp8 and any(int(name) < FP8_FROM for name in built_on(backend)):
        raise OptionError(f"this machine's sm_{built_on(backend)[0]} has no FP8: use int8")
    if options.timing_cache and not options.timing_cache.absolute().parent.is_dir():
        raise OptionError(f"{options.timing_cache} cannot be written, its folder is missing: make it, or give another")


def built_on(backend: str) -> tuple[str, ...]:
    """Return the architecture that `tensorrt` compiles for, such as ("89",): this machine's GPU. () for RTX."""
    if BACKENDS[backend].compiles_here:
        return ()
    from specbuild.runtime.backends.gpu.cuda import Cuda

    device = Cuda()
    try:
        return (device.capability,)
    finally:
        device.close()


def compile_engine(
    graph: Path,
    backend: str,
    profiles: Sequence[Profile],
    options: EngineOptions | None = None,
    progress: Progress = lambda phase, share: None,
) -> Engine:
    """Compile a graph to an engine.

    Args:
        graph: The ONNX file.
        backend: "tensorrt" or "tensorrt-rtx".
        profiles: Optimization profiles, with sizes for all dynamic dimensions.
        options: How to compile, by default as TensorRT does.
        progress: Called with a phase and the share of it that is done.

    Raises:
        OptionError: An option is wrong, or a profile lacks a dimension.
        ExecutionError: TensorRT refuses the graph.
    """
    trt, options = flavour(backend), options or EngineOptions()
    if options.plugin(BACKENDS[backend]):
        load_plugin(trt)  # the parser looks it up in the registry
    log = logger(trt)
    log.clear()
    builder = trt.Builder(log)
    if builder is None:
        raise ExecutionError(f"{backend} does not start: {log.reason}")
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(graph)):
        raise ExecutionError(f"{backend} does not take {graph.name}: {_reason(parser, log)}")
    _let_attention_decompose(trt, network)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    dimensions = _dimensions(graph)
    for profile in profiles:
        config.add_optimization_profile(_shapes(builder, network, profile, dimensions))
    _configure(trt, config, options)
    config.progress_monitor = monitor = _monitor(trt, progress)
    with _silent():
        plan = builder.build_serialized_network(network, config)
    if monitor.stopped:
        raise monitor.stopped
    if plan is None:
        raise ExecutionError(f"{backend} cannot compile {graph.name}: {log.reason}")
    if options.timing_cache:
        write(options.timing_cache, bytes(config.get_timing_cache().serialize()))
    layers = [(layer.name, layer.type.name) for layer in map(network.get_layer, range(network.num_layers))]
    return Engine(bytes(plan), str(trt.__version__), layers)


def _configure(trt: Any, config: Any, options: EngineOptions) -> None:
    """Set TensorRT's configuration from the options; float32 is never rounded to TF32."""
    config.clear_flag(trt.BuilderFlag.TF32)
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION") and not options.weight_streaming:  # for CUDA graphs
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    targets = options.targets
    if targets:
        config.num_compute_capabilities = len(targets)
        for index, name in enumerate(targets):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{name}"), index)
    if options.builder_optimization_level is not None:
        config.builder_optimization_level = options.builder_optimization_level
    if options.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace << 20)
    for name in ("weight_streaming", "version_compatible"):
        if getattr(options, name):
            config.set_flag(getattr(trt.BuilderFlag, name.upper()))
    if options.hardware_compatible:
        config.hardware_compatibility_level = getattr(
            trt.HardwareCompatibilityLevel, HARDWARE[options.hardware_compatible]
        )
    if options.timing_cache:
        stored = options.timing_cache.read_bytes() if options.timing_cache.is_file() else b""
        if not config.set_timing_cache(config.create_timing_cache(stored), ignore_mismatch=False):
            raise OptionError(f"{options.timing_cache} is another machine's or TensorRT's timing cache: remove it")


@contextmanager
def _silent() -> Iterator[None]:
    """Silence standard error, to which TensorRT's compiler writes what the log receives, too; not if that is wanted."""
    if verbose():
        yield
        return
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _let_attention_decompose(trt: Any, network: Any) -> None:
    """Let attention without a kernel of its own (one node per sequence) become simpler operators; other plans stay."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # how the bindings cast a layer to its type
            layer.attention.decomposable = True  # otherwise TensorRT-RTX 1.7 refuses the whole network


def _dimensions(graph: Path) -> dict[str, list[int | str]]:
    """Return each input's dimensions, dynamic ones by the names that TensorRT does not keep."""
    import onnx

    model = onnx.load(graph, load_external_data=False)
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }


def _shapes(builder: Any, network: Any, profile: Profile, dimensions: dict[str, list[int | str]]) -> Any:
    """Return TensorRT's form of a profile; raise OptionError if it lacks a dimension."""
    shapes = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        name = network.get_input(index).name
        dims = dimensions[name]
        unknown = [dim for dim in dims if isinstance(dim, str) and dim not in profile.sizes]
        if unknown:
            raise OptionError(f"profile {profile.name!r} has no sizes for {unknown[0]}, a dimension of {name}")
        if any(isinstance(dim, str) for dim in dims):
            each = [tuple(profile.sizes[d][i] if isinstance(d, str) else d for d in dims) for i in range(3)]
            shapes.set_shape(name, *each)
    return shapes


def _reason(parser: Any, log: Any) -> str:
    """Return the parser's first error, with the node that it is about."""
    if not parser.num_errors:
        return str(log.reason)
    error = parser.get_error(0)
    where = f"node {error.node_name()!r} ({error.node_operator()}): " if error.node_name() else ""
    return where + " ".join(str(error.desc()).split())


def _monitor(trt: Any, progress: Progress) -> Any:
    """Return a monitor that calls `progress(phase, share)`; phases nest, and a share is that of a phase's own steps.

    TensorRT would lose an exception of `progress`, Ctrl-C included: it is kept as `stopped`, and ends the build.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.stopped: BaseException | None = None

        def tell(self, phase: str, share: float) -> None:
            try:
                progress(phase, share)
            except BaseException as error:
                self.stopped = self.stopped or error

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = max(steps, 1)
            self.tell(phase, 0.0)

        def step_complete(self, phase: str, step: int) -> bool:
            self.tell(phase, min(1.0, (step + 1) / self.steps[phase]))
            return self.stopped is None

        def phase_finish(self, phase: str) -> None:
            self.tell(phase, 1.0)

    return Monitor()
