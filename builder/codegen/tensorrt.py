"""ONNX to TensorRT: one path for the flavours `tensorrt` and `tensorrt-rtx`, whose Python modules have one API.

A network is strongly typed: its graph says every type. TensorRT's own messages are kept, and the last error becomes the
reason of a failure, with the node's name where the parser knows it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.engine_options import FP8_FROM, HARDWARE, EngineOptions
from specbuild.runtime.backends.gpu.device import MAX_NODES
from specbuild.runtime.backends.gpu.plan import load_plugin, logger
from specbuild.runtime.bundle.atomic_output import write
from specbuild.runtime.bundle.backend import BACKENDS
from specbuild.runtime.errors import ExecutionError, OptionError, SpecbuildError, one_line

Progress = Callable[[str, float], None]
CHUNK = 512  # nodes of a prompt in a step, by default


@dataclass(frozen=True, slots=True)
class Profile:
    """One optimization profile: by each dynamic dimension's name its least, usual and largest size."""

    name: str
    sizes: Mapping[str, tuple[int, int, int]]

    def __post_init__(self) -> None:
        for dimension, sizes in self.sizes.items():
            if not 0 <= sizes[0] <= sizes[1] <= sizes[2]:
                raise OptionError(f"profile {self.name!r} has sizes {sizes} for {dimension}: least, usual, largest")


@dataclass(frozen=True, slots=True)
class Engine:
    """A compiled plan, TensorRT's version, and the parsed network's layers: name and type, in order."""

    plan: bytes
    version: str
    layers: list[tuple[str, str]]


def flavour(backend: str) -> Any:
    """The Python module of a backend; raises OptionError where it is not installed."""
    try:
        return importlib.import_module(str(BACKENDS[backend].package))
    except ImportError as error:
        raise OptionError(f"{backend} is not installed ({one_line(error)}): pip install {backend}") from None


def make_profiles(buckets: Sequence[int], batch_size: int, chunk: int, pages: int = 1) -> list[Profile]:
    """One for each bucket, and one for longer chunks of a prompt, at most `chunk` nodes, where that is more.

    The batch is dynamic in all of them, even where there is one sequence: profiles of which some have a fixed batch of
    1 each lay out the weights in their own way, and TensorRT-RTX 1.7 stores them once for either. A prompt is a chain,
    which needs no tree. `pages`: most that paged caches may have, whatever the step.
    """
    batch = (1, 1, max(2, batch_size))
    least, caches = buckets[-1] + 1, {"pages": (1, pages, pages)}
    tree = {n: (n, MAX_NODES, MAX_NODES) for n in buckets}  # of the plugin: a draft's levels are a tree too
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
    """The profiles of a build's engines."""
    chunk, block = min(config.engine.prompt_chunk or CHUNK, max_seq_len), config.engine.block_size
    pages = 1 + config.max_batch_size * (capacity_of(config, max_seq_len) // block) if block else 1  # one is nobody's
    return make_profiles(config.buckets, config.max_batch_size, chunk, pages)


def capacity_of(config: BuildConfig, max_seq_len: int) -> int:
    """Cache rows of a slot: the longest text, and the largest bucket, whose padded nodes write there too.

    In engines a multiple of 64, for TensorRT wants the slots' addresses to be multiples of 256; and whole pages.
    """
    rows, unit = max_seq_len + config.buckets[-1], max(64, config.engine.block_size)
    return -(-rows // unit) * unit if config.descriptor.compiles else rows


def check_machine(backend: str, options: EngineOptions, fp8: bool = False) -> None:
    """Before minutes are spent: is TensorRT here, and a GPU where it needs one? Raises OptionError.

    fp8: weights and activations are to be in FP8.
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
    """The GPU that `tensorrt` compiled for, ("89",): the one it ran on. () for RTX."""
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
    """Compile a graph whose dynamic dimensions the profiles name.

    Raises OptionError for what is asked wrongly, ExecutionError for what TensorRT refuses.
    """
    trt, options = flavour(backend), options or EngineOptions()
    if options.plugin(BACKENDS[backend]):
        load_plugin(trt)  # the parser asks the registry for it
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
    """The options as TensorRT takes them; float32 is never rounded to TF32."""
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
    """TensorRT's compiler writes to standard error by itself: what it says there comes through the log as well."""
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _let_attention_decompose(trt: Any, network: Any) -> None:
    """Where an attention has no kernel of its own (one node a sequence has none), it may become simpler operators.

    Without that TensorRT-RTX 1.7 refuses the whole network; where there is a kernel, the plan stays the same.
    """
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # the bindings' own way to a layer's kind
            layer.attention.decomposable = True


def _dimensions(graph: Path) -> dict[str, list[int | str]]:
    """Each input's dimensions; dynamic ones by name, which TensorRT does not keep."""
    import onnx

    model = onnx.load(graph, load_external_data=False)
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }


def _shapes(builder: Any, network: Any, profile: Profile, dimensions: dict[str, list[int | str]]) -> Any:
    """A profile as TensorRT takes it."""
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
    """The parser's first error with the node it is about."""
    if not parser.num_errors:
        return str(log.reason)
    error = parser.get_error(0)
    where = f"node {error.node_name()!r} ({error.node_operator()}): " if error.node_name() else ""
    return where + " ".join(str(error.desc()).split())


def _monitor(trt: Any, progress: Progress) -> Any:
    """TensorRT's progress as calls of `progress(phase, share)`; phases nest, and the share is of their own steps.

    What is raised meanwhile, Ctrl-C included, would be lost in TensorRT: it is kept as `stopped`, and ends the build.
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
