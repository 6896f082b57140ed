"""Networks: an ONNX model, and the layers that TensorRT would make of its nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx
from onnx import TensorProto, helper

from . import names
from .operators import LAYERS
from .plan import Tensor


class ILayer:
    """A layer by its name and type."""

    def __init__(self, name, kind):
        self.name, self.type = name, names.LayerType[kind]
        self._attention = _Attention()


class _Attention:
    decomposable = False


class IAttentionInputLayer(ILayer):
    """What a layer becomes whose class is set to this, as the real bindings have it."""

    @property
    def attention(self):
        return self._attention


class ITensor:
    """A tensor of a network."""

    def __init__(self, name):
        self.name, self.shape = name, ()


class INetworkDefinition:
    """A network; strongly typed, or it is refused."""

    def __init__(self, flags):
        if not flags >> int(names.NetworkDefinitionCreationFlag.STRONGLY_TYPED) & 1:
            raise ValueError("the stand-in's networks are strongly typed")
        self.model: Any = None
        self.layers: list[ILayer] = []
        self._nodes: list[tuple[str, ITensor, ITensor, _Made]] = []
        self._inputs: list[tuple[ITensor, tuple[int, ...]]] = []
        self._outputs: list[ITensor] = []

    @property
    def num_layers(self):
        return len(self.layers)

    def get_layer(self, index):
        return self.layers[index]

    @property
    def num_inputs(self):
        return len(self.finished.graph.input)

    def get_input(self, index):
        return ITensor(self.finished.graph.input[index].name)

    def take(self, model):
        """An ONNX model, and its layers."""
        self.model = model
        for node in model.graph.node:
            self.layers += [ILayer((node.name or node.output[0]) + end, kind) for end, kind in LAYERS[node.op_type]]

    # ---- toys, by the API's own calls

    def add_input(self, name, dtype, shape):
        assert dtype == names.float32
        self._inputs.append((ITensor(name), shape))
        return self._inputs[-1][0]

    def add_elementwise(self, left, right, operation):
        made = _Made(f"elementwise.{len(self._nodes)}", "ELEMENTWISE")
        self._nodes.append((operation.value, left, right, made))
        self.layers.append(made)
        return made

    def mark_output(self, tensor):
        self._outputs.append(tensor)

    @property
    def finished(self):
        """The ONNX model: the parsed one, or the toy."""
        if self.model is None:
            shape = self._inputs[0][1]
            nodes = [helper.make_node(op, [x.name, y.name], [z.result.name]) for op, x, y, z in self._nodes]
            inputs = [helper.make_tensor_value_info(x.name, TensorProto.FLOAT, each) for x, each in self._inputs]
            outputs = [helper.make_tensor_value_info(x.name, TensorProto.FLOAT, shape) for x in self._outputs]
            graph = helper.make_graph(nodes, "toy", inputs, outputs)
            return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        return self.model


class _Made(ILayer):
    def __init__(self, name, kind):
        super().__init__(name, kind)
        self.result = ITensor(f"{name}.output")

    def get_output(self, index):
        assert index == 0
        return self.result


def tensors_of(model):
    """A model's inputs and outputs. A cache that is scattered into is its output's alias, and of its shape."""
    scattered = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "TensorScatter"}
    found = {value.name: _tensor(value) for value in model.graph.input}
    outputs = list[Tensor]()
    for value in model.graph.output:
        cache = found.get(scattered.get(value.name, ""))
        outputs.append(replace(_tensor(value), output=True))
        if cache:
            outputs[-1] = replace(outputs[-1], alias=cache.name, dims=cache.dims)
    return [*found.values(), *outputs]


def _tensor(value):
    kind = value.type.tensor_type
    dims = tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
    return Tensor(value.name, names.BY_ONNX[kind.elem_type], dims)


def load(path):
    """A model with its weights in it."""
    return onnx.load(path)
