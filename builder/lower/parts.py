"""Lowers for ONNX Runtime's CUDA provider with specbuild's own kernels: graphs that end where a kernel begins.

The kernels are TreeAttention and products with weights in blocks, `BlockProduct(x, codes, factors)`. `cut` cuts the
lowered graph at them. A part takes every weight as an input, so layers of the same form are one graph, which runs for
each with that layer's weights. The runtime launches kernels between parts, and captures all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from specbuild.builder.passes import clean
from specbuild.builder.passes.pattern import dims, insert, producer, replace

from . import plugin
from .block_panels import pack_weight, rows_of
from .plugin import INPUTS, OUTPUTS


def _transposed_product(node: ir.Node) -> list[ir.Value]:
    """Lower a product with a transposed weight to ONNX Runtime's own kernel, which reads it as it is stored."""
    return list(insert(node, "FusedMatMul", node.inputs, "com.microsoft", {"transB": 1}).outputs)


def _residual_norm(node: ir.Node) -> list[ir.Value]:
    """Lower AddRMSNorm to ONNX Runtime's own kernel."""
    attributes = {"epsilon": node.attributes["epsilon"].as_float()}
    new = insert(node, "SkipSimplifiedLayerNormalization", node.inputs, "com.microsoft", attributes, outputs=4)
    for unused in new.outputs[1:3]:
        unused.name = ""
    return [new.outputs[0], new.outputs[3]]


_FUSED = {"AddRMSNorm": _residual_norm, "MatMulNT": _transposed_product}  # ONNX Runtime's own kernels
_STATES = "past_", "present_"  # caches, which the kernel reads and writes in place
_KERNELS = "TreeAttention", "BlockProduct"


@dataclass(frozen=True, slots=True)
class Part:
    """A graph between kernels, and the values that it reads and makes.

    Attributes:
        graph: The graph; its values have names of their own, so parts of the same form are the same graph.
        inputs: The values and weights that it reads, in the order of the graph's inputs.
        outputs: The values that it makes, in the order of the graph's outputs.
    """

    graph: ir.Model
    inputs: list[ir.Value]
    outputs: list[ir.Value]


def lower(portable: ir.Model, precision: str, capacity: int, *of_caches: Any) -> ir.Model:
    """Return a new model, still whole; see `plugin.lower`, whose arguments these are, and `cut`."""
    model, packed = portable.clone(), dict[str, list[ir.Value]]()
    for node in list(model.graph):
        if node.op_type in _FUSED:
            made = _FUSED[node.op_type](node)
        elif node.op_type == "BlockMatMul":
            made = _block_product(node, packed)
        else:
            continue
        for old, new in zip(node.outputs, made, strict=True):
            new.shape, new.type = new.shape or old.shape, new.type or old.type
            replace(old, new)
        model.graph.remove(node, safe=True)
    lowered = plugin.lower(model, precision, capacity, *of_caches)
    _without_views(lowered)
    return lowered


def _block_product(node: ir.Node, packed: dict[str, list[ir.Value]]) -> list[ir.Value]:
    graph = node.graph
    assert graph is not None
    form, weight = pack_weight(graph, node, packed)
    attributes = asdict(form) | {"inner": node.attributes["columns"].as_int(), "columns": rows_of(node)}
    new = insert(node, "BlockProduct", [node.inputs[0], *weight], plugin.DOMAIN, attributes)
    new.outputs[0].shape = ir.Shape([*(dims(node.inputs[0]) or ())[:-1], rows_of(node)])
    new.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return list(new.outputs)


def _without_views(model: ir.Model) -> None:
    """Let kernels read and write what a Reshape beside them only views: they take rows as they lie in memory."""
    for node in [node for node in model.graph if node.op_type == "BlockProduct"]:
        while view := producer(node.inputs[0], "Reshape"):
            node.replace_input_with(0, view.inputs[0])
        (product,), uses = node.outputs, list(node.outputs[0].uses())
        if len(uses) == 1 and uses[0].node.op_type == "Reshape" and not product.is_graph_output():
            view = uses[0].node
            product.shape = view.outputs[0].shape
            replace(view.outputs[0], product)
    clean(model)


def cut(model: ir.Model) -> list[Part | ir.Node]:
    """Return a lowered model's parts and kernels in the order in which they run; a part without nodes is left out."""
    stages = _stages(model.graph)
    results = [value for value in model.graph.outputs if not str(value.name).startswith(_STATES)]
    steps = list[Part | ir.Node]()
    for number in range(max(stages.values(), default=0) + 1):
        nodes = [node for node, stage in stages.items() if stage == number]
        if between := [node for node in nodes if not is_kernel(node)]:
            steps.append(part_of(model, between, results))
        steps += [node for node in nodes if is_kernel(node)]
    return steps


def is_kernel(node: ir.Node | None) -> bool:
    """Return whether a node is one of specbuild's own kernels."""
    return node is not None and node.op_type in _KERNELS


def _stages(graph: ir.Graph) -> dict[ir.Node, int]:
    """Return the stage of each node: after the kernels that it depends on, and as late as its results allow."""
    stages = dict[ir.Node, int]()
    for node in graph:
        makers = [value.producer() for value in node.inputs if value is not None]
        stages[node] = max((stages[maker] + is_kernel(maker) for maker in makers if maker), default=0)
    for node in reversed(list(graph)):
        users = [stages[use.node] for output in node.outputs for use in output.uses()]
        if users and not is_kernel(node):
            stages[node] = max(stages[node], min(users))
    return stages


def part_of(model: ir.Model, nodes: Sequence[ir.Node], results: Sequence[ir.Value]) -> Part:
    """Return the part that these nodes are; `results` are the values that the whole model gives."""
    inside = set(nodes)
    read = [value for node in nodes for value in node.inputs if value is not None and value.producer() not in inside]
    inputs = [value for value in dict.fromkeys(read) if not _stays(value)]
    made = [output for node in nodes for output in node.outputs]
    outputs = [v for v in made if v in results or any(use.node not in inside for use in v.uses())]
    copies = {value: _copy(value, f"i{number}") for number, value in enumerate(inputs)}
    kept = {value: _copy(value, f"c{n}") for n, value in enumerate(v for v in dict.fromkeys(read) if _stays(v))}
    for value, copy in kept.items():
        copy.const_value = ir.tensor(value.const_value.numpy(), name=copy.name)  # type: ignore[union-attr]
    copies |= kept
    copied = list[ir.Node]()
    for node in nodes:
        new = ir.Node(
            node.domain,
            node.op_type,
            [value and copies[value] for value in node.inputs],
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
        )
        for output, copy in zip(node.outputs, new.outputs, strict=True):
            copies[output] = copy
            copy.name = "" if output.name == "" else f"v{len(copies)}"
            copy.shape, copy.type = output.shape, output.type
        copied.append(new)
    for number, value in enumerate(outputs):
        copies[value].name = f"o{number}"
    graph = ir.Graph(
        [copies[value] for value in inputs],
        [copies[value] for value in outputs],
        nodes=copied,
        initializers=list(kept.values()),
        opset_imports=dict(model.graph.opset_imports) | {"com.microsoft": 1},
        name="part",
    )
    return Part(ir.Model(graph, ir_version=model.ir_version), inputs, outputs)


def _stays(value: ir.Value) -> bool:
    """Return whether a value stays in the graph: a constant that is no weight, or one of fewer than 16 bits."""
    kind = value.dtype
    assert kind is not None
    return value.is_initializer() and (not kind.is_floating_point() or kind.itemsize < 2 or not value.shape)


def _copy(value: ir.Value, name: str) -> ir.Value:
    return ir.Value(name=name, shape=value.shape, type=value.type)


__all__ = ["INPUTS", "OUTPUTS", "Part", "cut", "is_kernel", "lower", "part_of"]
