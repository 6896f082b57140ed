"""Plans that are loaded: their tensors, profiles and layers, and the contexts that run them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import card_driver

from . import names
from .bfloat16 import widened
from .context import IExecutionContext, IRuntimeConfig
from .plan import HEADER, faults, unpack

_SCRATCH = 1 << 16  # bytes that every profile needs


class Runtime:
    """Loads plans."""

    engine_header_size = HEADER
    engine_host_code_allowed = False

    def __init__(self, log):
        self._log = log
        card_driver.enter()

    def get_engine_validity(self, header):
        wrong = faults(bytes(header))
        return (names.EngineValidity.INVALID if wrong else names.EngineValidity.VALID), int(wrong)

    def deserialize_cuda_engine(self, data):
        """None, with a reason in the log, for what is no plan or another card's."""
        whole = bytes(data)
        try:
            if wrong := faults(whole):
                raise RuntimeError(f"the engine is refused: {wrong!r}")
            return ICudaEngine(unpack(whole), hashlib.sha256(whole).hexdigest(), self._log)
        except Exception as error:  # of JSON, of ONNX Runtime
            what = " ".join(str(error).split())
            self._log.log(names.ILogger.ERROR, f"IRuntime::deserializeCudaEngine: Error Code 1: {what}")
            return None


class ICudaEngine:
    """A plan, and ONNX Runtime's session of its model."""

    device_memory_size_v2 = _SCRATCH

    def __init__(self, content, digest, log):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session = onnxruntime.InferenceSession(widened(content.model), options, providers=["CPUExecutionProvider"])
        self.content, self.digest, self.log = content, digest, log
        self.tensors = {each.name: each for each in content.tensors}
        self.streamable_weights_size = len(content.model) if content.streams_weights else 0
        self.weight_streaming_budget_v2 = self.streamable_weights_size
        self.bindings: dict[Any, Any] = {}

    @property
    def num_optimization_profiles(self):
        return len(self.content.profiles)

    @property
    def num_layers(self):
        return len(self.content.layers)

    @property
    def num_io_tensors(self):
        return len(self.tensors)

    def get_tensor_name(self, index):
        return self.content.tensors[index].name

    def get_tensor_mode(self, name):
        return names.TensorIOMode.OUTPUT if self.tensors[name].output else names.TensorIOMode.INPUT

    def get_tensor_dtype(self, name):
        return names.DataType[self.tensors[name].dtype]

    def get_tensor_shape(self, name):
        return tuple(-1 if isinstance(dim, str) else dim for dim in self.tensors[name].dims)

    def get_aliased_input_tensor(self, name):
        return self.tensors[name].alias or ""

    def get_tensor_profile_shape(self, name, profile):
        shapes = self.content.profiles[profile]
        return list(shapes[name]) if name in shapes else [self.get_tensor_shape(name)] * 3

    def inputs(self):
        return [each for each in self.content.tensors if not each.output]

    def create_runtime_config(self):
        return IRuntimeConfig()

    def create_execution_context(self, config=None):
        return IExecutionContext(self, config or IRuntimeConfig())

    def create_engine_inspector(self):
        return EngineInspector(self)


class EngineInspector:
    """Tells of an engine's layers."""

    def __init__(self, engine):
        self._engine = engine

    def get_engine_information(self, form):
        layers = [{"Name": name, "LayerType": kind} for name, kind in self._engine.content.layers]
        return json.dumps({"Layers": layers}) if form == names.LayerInformationFormat.JSON else str(layers)
