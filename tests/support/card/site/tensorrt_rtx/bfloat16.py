"""Models in bfloat16, of which ONNX Runtime's CPU provider computes nothing: they become float32 between casts.

Weights, inputs and outputs are rounded as they were; what is computed in between is not.
"""

import onnx
from onnx import TensorProto, helper, numpy_helper


def widened(data):
    """A model that the CPU provider runs; one without bfloat16 stays as it is."""
    model = onnx.load_from_string(data)
    graph = model.graph
    values = [*graph.input, *graph.output]
    if not any(_is_narrow(value) for value in values):
        return data
    for weight in graph.initializer:
        if weight.data_type == TensorProto.BFLOAT16:
            weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype("float32"), weight.name))
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.BFLOAT16:
                attribute.i = TensorProto.FLOAT
    inputs = {value.name for value in graph.input if _is_narrow(value)}
    outputs = {value.name for value in graph.output if _is_narrow(value)}
    for node in graph.node:
        node.input[:] = [f"{name}.wide" if name in inputs | outputs else name for name in node.input]
        node.output[:] = [f"{name}.wide" if name in outputs else name for name in node.output]
    first = [helper.make_node("Cast", [name], [f"{name}.wide"], to=TensorProto.FLOAT) for name in sorted(inputs)]
    last = [helper.make_node("Cast", [f"{name}.wide"], [name], to=TensorProto.BFLOAT16) for name in sorted(outputs)]
    nodes = [*first, *graph.node, *last]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    return bytes(model.SerializeToString())


def _is_narrow(value):
    return bool(value.type.tensor_type.elem_type == TensorProto.BFLOAT16)
