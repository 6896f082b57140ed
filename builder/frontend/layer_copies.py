"""Copies traced layers in the portable graph, for the layers that `repeated_layers` left out of the trace."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor, nn

from .lazy_weights import Weight
from .repeated_layers import Repeated
from .simplification import of_weight

_SCOPES = "pkg.torch.onnx.name_scopes"


class NotRepeatedError(Exception):
    """The graph is not the chain of layers that copying takes for granted."""


@dataclass
class _Block:
    """A traced layer's nodes, and the hidden states that it reads and makes; the first layer's input is left open."""

    nodes: list[ir.Node] = field(default_factory=list)
    reads: ir.Value | None = None
    makes: ir.Value | None = None


def copy_layers(
    graph: ir.Graph, found: Repeated, model: nn.Module, weights: Mapping[str, Weight], names: list[str]
) -> None:
    """Put the layers that were not traced into a graph, whose weights are named as the model names them.

    Args:
        graph: The portable graph of the traced layers. Its inputs have the caches of all layers, its outputs those of
            the traced ones.
        found: Which layers were traced, and which are copies.
        model: The model, whose buffers are copied as they are.
        weights: The weights of all layers, by the model's names.
        names: The graph's outputs, once all layers are in it.

    Raises:
        NotRepeatedError: More than the hidden state goes from layer to layer.
    """
    blocks = _blocks(graph, found)
    readers = _connect(graph, blocks)
    copier = _Copier(graph, found.path.removeprefix("model."), weights, dict(model.named_buffers()))
    outputs = {str(value.name): value for value in graph.outputs}
    hidden = blocks[0].makes
    for place in range(1, len(found.layers)):
        block = blocks.get(place)
        if block:
            for node in block.nodes:
                _replace(node, block.reads, hidden)
            block.reads, hidden = hidden, block.makes
            continue
        model_of = found.like[place]
        copied = copier.copy(blocks[model_of], model_of, place, hidden)
        hidden = copied[blocks[model_of].makes]
        for kind in ("key", "value"):
            value = copied[outputs[f"present_{kind}.{model_of}"]]
            assert value is not None
            value.name = f"present_{kind}.{place}"
            outputs[value.name] = value
    for node in readers:
        _replace(node, blocks[found.traced[-1]].makes, hidden)
    graph.outputs[:] = [outputs[name] for name in names]
    graph.sort()


def _blocks(graph: ir.Graph, found: Repeated) -> dict[int, _Block]:
    """The traced layers' nodes, by the scopes that torch notes."""
    scopes = {f"{found.path}.{place}": place for place in found.traced}
    blocks = {place: _Block() for place in found.traced}
    for node in graph:
        for scope in ast.literal_eval(node.metadata_props.get(_SCOPES, "[]")):
            if scope in scopes:
                blocks[scopes[scope]].nodes.append(node)
                break
    if not all(block.nodes for block in blocks.values()):
        raise NotRepeatedError("a layer has no nodes")
    return blocks


def _connect(graph: ir.Graph, blocks: dict[int, _Block]) -> list[ir.Node]:
    """Note what each block reads and makes; returns the nodes behind the last that read what it makes."""
    inside = {node: place for place, block in blocks.items() for node in block.nodes}
    places = list(blocks)
    before: dict[int | None, int] = dict(zip([*places[1:], None], places, strict=True))
    crossing: dict[int | None, set[ir.Value]] = {reader: set() for reader in before}
    for node in graph:
        reader = inside.get(node)
        for value in node.inputs:
            maker = inside.get(value.producer()) if value is not None else None  # type: ignore[arg-type]
            if value is None or maker is None or maker == reader or _is_shared(value):
                continue
            if before.get(reader) != maker:
                raise NotRepeatedError(f"{value.name} goes from layer {maker} to {reader}")
            crossing[reader].add(value)
    for reader, maker in before.items():
        if len(crossing[reader]) != 1:
            raise NotRepeatedError(f"{len(crossing[reader])} values go from layer {maker} to {reader}")
        (blocks[maker].makes,) = crossing[reader]
        if reader is not None:
            blocks[reader].reads = blocks[maker].makes
    end = blocks[places[-1]].makes
    return [node for node in graph if node not in inside and end in node.inputs]


def _is_shared(value: ir.Value) -> bool:
    """Return whether a value is a size or a constant, which is made once, in whichever layer asks first."""
    made = value.producer()
    return (value.dtype is not None and value.dtype.is_integer()) or (made is not None and made.op_type == "Constant")


def _replace(node: ir.Node, old: ir.Value | None, new: ir.Value | None) -> None:
    for index, value in enumerate(node.inputs):
        if value is old:
            node.replace_input_with(index, new)


class _Copier:
    """Copies blocks of one graph."""

    def __init__(
        self, graph: ir.Graph, path: str, weights: Mapping[str, Weight], buffers: Mapping[str, Tensor]
    ) -> None:
        self._graph, self._path, self._weights, self._buffers = graph, path, weights, buffers
        self._inputs = {value.name: value for value in graph.inputs}

    def copy(
        self, block: _Block, model: int, place: int, hidden: ir.Value | None
    ) -> dict[ir.Value | None, ir.Value | None]:
        """Copy a block for another layer; returns the copies of its values.

        Args:
            block: What is copied.
            model: Whose layer's nodes these are.
            place: Whose layer's the copies become.
            hidden: The hidden state that they read.
        """
        copied: dict[ir.Value | None, ir.Value | None] = {block.reads: hidden}
        for node in block.nodes:
            if any(each.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for each in node.attributes.values()):
                raise NotRepeatedError(f"{node.op_type} holds a graph")
            inputs = [self._input(value, copied, model, place) for value in node.inputs]
            outputs = [
                ir.Value(name=self._name(value, model, place), shape=value.shape, type=value.type)
                for value in node.outputs
            ]
            made = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                list(node.attributes.values()),
                overload=node.overload,
                outputs=outputs,
                version=node.version,
                name=f"{node.name}.{place}",
                metadata_props=dict(node.metadata_props),
            )
            copied.update(zip(node.outputs, outputs, strict=True))
            self._graph.append(made)
        return copied

    def _input(
        self, value: ir.Value | None, copied: Mapping[ir.Value | None, ir.Value | None], model: int, place: int
    ) -> ir.Value | None:
        if value is None or value in copied:
            return copied.get(value)
        name = str(value.name)
        if value.is_graph_input() and name.endswith(f".{model}"):
            return self._inputs[name.removesuffix(f".{model}") + f".{place}"]
        if value.is_initializer() and name.startswith(f"{self._path}.{model}."):
            return self._weight(name.replace(f"{self._path}.{model}.", f"{self._path}.{place}.", 1))
        return value

    def _weight(self, name: str) -> ir.Value:
        if name not in self._graph.initializers:
            if name in self._weights:
                tensor = of_weight(name, self._weights[name])
            elif name in self._buffers:
                tensor = TorchTensor(self._buffers[name], name=name)
            else:
                raise NotRepeatedError(f"there is no {name}")
            self._graph.initializers[name] = ir.val(name, const_value=tensor)
        return self._graph.initializers[name]

    def _name(self, value: ir.Value, model: int, place: int) -> str:
        name, own = str(value.name), f"{self._path}.{model}."
        return name.replace(own, f"{self._path}.{place}.", 1) if own in name else f"{name}.{place}"
