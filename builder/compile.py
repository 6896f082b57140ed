"""ONNX to TensorRT: one path for the flavours `tensorrt` and `tensorrt-rtx`, whose Python modules have one API.

A network is strongly typed: its graph says every type. TensorRT's own messages are kept, and the last error becomes the
reason of a failure, with the node's name where the parser knows it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.errors import ExecutionError, OptionError, one_line
from .kernels import split_names

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
RTX_ARCHITECTURES = ("75", "80", "86", "89", "120", "121")
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Profile:
    """One optimization profile: by each dynamic dimension's name its least, usual and largest size."""

    name: str
    sizes: Mapping[str, tuple[int, int, int]]

    def __post_init__(self) -> None:
        for dimension, sizes in self.sizes.items():
            if not 0 < sizes[0] <= sizes[1] <= sizes[2]:
                raise OptionError(f"profile {self.name!r} has sizes {sizes} for {dimension}: least, usual, largest")


@dataclass(frozen=True, slots=True)
class Engine:
    """A compiled plan, and the parsed network's layers by type."""

    plan: bytes
    version: str
    layers: dict[str, int]


def flavour(backend: str) -> Any:
    """The Python module of a backend; raises OptionError where it is not installed."""
    try:
        return importlib.import_module(MODULES[backend])
    except ImportError as error:
        raise OptionError(f"{backend} is not installed ({one_line(error)}): pip install {backend}") from None


def architectures(wanted: Sequence[str]) -> tuple[str, ...]:
    """TensorRT-RTX's targets, each once; () is portable, for whatever it supports. Raises OptionError."""
    names = split_names(wanted)
    for name in names:
        if name not in (*RTX_ARCHITECTURES, "portable"):
            raise OptionError(f"TensorRT-RTX has no sm_{name}: use {', '.join(RTX_ARCHITECTURES)}, or portable")
    if "portable" in names and len(set(names)) > 1:
        raise OptionError("an engine is portable or for named architectures, not both")
    return tuple(dict.fromkeys(name for name in names if name != "portable"))


def compile_engine(
    graph: Path,
    backend: str,
    profiles: Sequence[Profile],
    targets: Sequence[str] = (),
    progress: Progress | None = None,
) -> Engine:
    """Compile a graph whose dynamic dimensions the profiles name; `targets` as `architectures` returns them.

    Raises OptionError for what is asked wrongly, ExecutionError for what TensorRT refuses.
    """
    trt = flavour(backend)
    log = _log(trt)
    builder = trt.Builder(log)
    if builder is None:
        raise ExecutionError(f"{backend} does not start: {log.last or 'no reason given'}")
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
    if targets:
        config.num_compute_capabilities = len(targets)
        for index, name in enumerate(targets):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{name}"), index)
    if progress:
        config.progress_monitor = _monitor(trt, progress)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ExecutionError(f"{backend} cannot compile {graph.name}: {log.last or 'no reason given'}")
    layers: dict[str, int] = {}
    for index in range(network.num_layers):
        kind = network.get_layer(index).type.name
        layers[kind] = layers.get(kind, 0) + 1
    return Engine(bytes(plan), str(trt.__version__), dict(sorted(layers.items())))


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
        return str(log.last or "no reason given")
    error = parser.get_error(0)
    where = f"node {error.node_name()!r} ({error.node_operator()}): " if error.node_name() else ""
    return where + " ".join(str(error.desc()).split())


def _log(trt: Any) -> Any:
    """A log that keeps the last error and prints nothing."""

    class Log(trt.ILogger):  # type: ignore[misc]
        last: str | None = None

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.last = " ".join(message.split())

    return Log()


def _monitor(trt: Any, progress: Progress) -> Any:
    """TensorRT's progress as calls of `progress(phase, share)`; phases nest, and the share is of their own steps."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = max(steps, 1)
            progress(phase, 0.0)

        def step_complete(self, phase: str, step: int) -> bool:
            progress(phase, min(1.0, (step + 1) / self.steps[phase]))
            return True

        def phase_finish(self, phase: str) -> None:
            progress(phase, 1.0)

    return Monitor()
