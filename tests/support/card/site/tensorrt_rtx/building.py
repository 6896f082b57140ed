"""The builder: what it is asked is checked as TensorRT-RTX checks it, and the model is put into a plan as it is."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from card_backends import listed

from . import names
from .network import INetworkDefinition, load, tensors_of
from .operators import LAYERS
from .plan import Content, pack

_PHASE = "Building Engine"


class IProgressMonitor:
    """To be derived from."""


class _Error:
    def __init__(self, node, what):
        self._node, self._what = node, what

    def node_name(self):
        return str(self._node.name) if self._node is not None else ""

    def node_operator(self):
        return str(self._node.op_type) if self._node is not None else ""

    def desc(self):
        return self._what


class OnnxParser:
    """Files to networks."""

    def __init__(self, network, log):
        self._network, self._log, self._errors = network, log, list[_Error]()

    def parse_from_file(self, path):
        try:
            model = load(path)
        except Exception as error:  # onnx raises many types
            return self._refuse(None, f"Failed to parse ONNX model from file {path}: {error}")
        for node in model.graph.node:
            if node.domain not in ("", "ai.onnx") or node.op_type not in LAYERS:
                return self._refuse(node, f"no importer registered for op: {node.op_type}")
        self._network.take(model)
        return True

    def _refuse(self, node, what):
        self._errors.append(_Error(node, what))
        self._log.log(names.ILogger.ERROR, what)
        return False

    @property
    def num_errors(self):
        return len(self._errors)

    def get_error(self, index):
        return self._errors[index]


class IOptimizationProfile:
    """Inputs' shapes: least, usual, largest."""

    def __init__(self):
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name, least, usual, largest):
        self.shapes[name] = tuple(least), tuple(usual), tuple(largest)


class IBuilderConfig:
    """What is asked of a build."""

    profiling_verbosity = names.ProfilingVerbosity.LAYER_NAMES_ONLY
    progress_monitor: Any = None
    builder_optimization_level = 3
    num_compute_capabilities = 0

    def __init__(self):
        self.flags, self.profiles = {names.BuilderFlag.TF32}, list[IOptimizationProfile]()
        self.limits, self._targets = dict[Any, int](), dict[int, Any]()

    def set_flag(self, flag):
        self.flags.add(names.BuilderFlag(flag))

    def clear_flag(self, flag):
        self.flags.discard(names.BuilderFlag(flag))

    def add_optimization_profile(self, profile):
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def set_compute_capability(self, capability, index):
        if not 0 <= index < self.num_compute_capabilities:
            return False
        self._targets[index] = names.ComputeCapability(capability)
        return True

    def set_memory_pool_limit(self, pool, size):
        self.limits[names.MemoryPoolType(pool)] = size

    @property
    def targets(self):
        """What a plan is for; unless asked, all that is listed."""
        return tuple(each.name.removeprefix("SM") for each in self._targets.values()) or listed()


class Builder:
    """Networks to plans."""

    def __init__(self, log):
        self._log = log

    def create_network(self, flags=0):
        return INetworkDefinition(flags)

    def create_builder_config(self):
        return IBuilderConfig()

    def create_optimization_profile(self):
        return IOptimizationProfile()

    def build_serialized_network(self, network, config):
        """None for what is refused, or where the monitor ends it."""
        tensors = tensors_of(network.finished)
        if wrong := _faults(network, config, tensors):
            self._log.log(names.ILogger.ERROR, f"IBuilder::buildSerializedNetwork: Error Code 4: {wrong}")
            return None
        with _progress(config.progress_monitor) as goes_on:
            if not goes_on:
                return None
            profiles = tuple(profile.shapes for profile in config.profiles)
            layers = tuple((layer.name, layer.type.name) for layer in network.layers)
            streams = names.BuilderFlag.WEIGHT_STREAMING in config.flags
            model = network.finished.SerializeToString()
            return pack(Content(tuple(tensors), profiles, layers, streams, model), config.targets)


@contextmanager
def _progress(monitor):
    """One phase of one step; whether the monitor lets it go on."""
    if monitor is None:
        yield True
        return
    monitor.phase_start(_PHASE, None, 1)
    yield monitor.step_complete(_PHASE, 0)
    monitor.phase_finish(_PHASE)


def _faults(network, config, tensors):
    """What is wrong with what is asked; "" where nothing is."""
    for layer in network.layers:
        if layer.type == names.LayerType.ATTENTION_INPUT and not layer._attention.decomposable:
            return f"{layer.name} has no kernel for one node, and is not decomposable"
    dynamic = [each for each in tensors if not each.output and any(isinstance(dim, str) for dim in each.dims)]
    known = {dim for each in tensors if not each.output for dim in each.dims}
    for each in tensors:
        if each.output and not {dim for dim in each.dims if isinstance(dim, str)} <= known:
            return f"{each.name} has a shape {each.dims} that no input's says"
    if dynamic and not config.profiles:
        return f"{dynamic[0].name} is dynamic, and there is no profile"
    for profile in config.profiles:
        for each in dynamic:
            if not _fits(each, profile.shapes.get(each.name)):
                return f"a profile has {profile.shapes.get(each.name)} for {each.name} of {each.dims}"
    return ""


def _fits(tensor, sizes):
    """Whether a profile's three shapes are a tensor's, in order."""
    if sizes is None or any(len(shape) != len(tensor.dims) for shape in sizes):
        return False
    return all(
        sizes[0][i] <= sizes[1][i] <= sizes[2][i] and (isinstance(dim, str) or {shape[i] for shape in sizes} == {dim})
        for i, dim in enumerate(tensor.dims)
    )
