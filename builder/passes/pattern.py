"""What the passes share: a base that counts matches, and a few ways of looking at a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes as passes

TRANSPOSED = ".T"  # ends the name of an initializer that is a weight turned round


class FusionPass(passes.InPlacePass):
    """Rewrites nodes one by one; `matched` counts them. A subclass implements `find` and `rewrite`.

    Pre: the graph has what `needs` names, inputs, outputs or operators. Post: `find` finds nothing any more; `left`
    says what is wrong with a node where it does.
    """

    needs: tuple[str, ...] = ()
    left: str

    def __init__(self) -> None:
        super().__init__()
        self.matched = 0

    def requires(self, model: ir.Model) -> None:
        """Raise PreconditionError for what the graph has not."""
        values = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
        for name in self.needs:
            if name not in values and all(node.op_type != name for node in model.graph):
                raise passes.PreconditionError(f"the graph has no {name}")

    def call(self, model: ir.Model) -> passes.PassResult:
        """Rewrite every node that is found, in order."""
        for node in list(model.graph):
            found = self.find(node) if node.graph is not None else None
            if found:
                self.rewrite(model.graph, node, found)
                self.matched += 1
        return passes.PassResult(model, modified=self.matched > 0)

    def ensures(self, model: ir.Model) -> None:
        """Raise PostconditionError for a node that is still found."""
        for node in model.graph:
            if self.find(node):
                raise passes.PostconditionError(f"{node.name} {self.left}")

    def find(self, node: ir.Node) -> Any:
        """What `rewrite` needs to know, of a node that matches; nothing of another."""
        raise NotImplementedError

    def rewrite(self, graph: ir.Graph, node: ir.Node, found: Any) -> None:
        """Rewrite around a node that matches."""
        raise NotImplementedError


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes a value, if it is of this type."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


def dims(value: ir.Value | None) -> list[str | int] | None:
    """A value's shape with names for dynamic dimensions; None where it is unknown."""
    if value is None or value.shape is None:
        return None
    return [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]


def same(first: Sequence[str | int], second: Sequence[str | int]) -> bool:
    """Whether two shapes are equal for certain; dimensions without a name may be any."""
    return list(first) == list(second) and str(None) not in first


def permutation(node: ir.Node) -> tuple[int, ...]:
    """A Transpose's axes."""
    attribute = node.attributes.get("perm")
    return tuple(attribute.as_ints()) if attribute is not None else ()


def constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """An initializer of this name and content; made once."""
    return graph.initializers[name] if name in graph.initializers else initializer(graph, ir.tensor(array, name=name))


def initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """A tensor as a new initializer of its name."""
    shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
    value = ir.Value(name=tensor.name, type=kind, shape=shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def renamed(stored: ir.ExternalTensor, name: str, shape: ir.Shape | None = None) -> ir.ExternalTensor:
    """The same bytes of a file under another name, or in another shape."""
    place = stored.location, stored.offset, stored.length, stored.dtype
    return ir.ExternalTensor(*place, shape=shape or stored.shape, name=name, base_dir=stored.base_dir)


def insert(
    before: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    domain: str = "",
    attributes: Mapping[str, Any] | None = None,
    outputs: Sequence[ir.Value] | int = 1,
) -> ir.Node:
    """A new node in front of another one."""
    node = ir.node(
        op_type,
        inputs,
        attributes,
        domain=domain,
        **({"num_outputs": outputs} if isinstance(outputs, int) else {"outputs": outputs}),
    )
    graph = before.graph
    assert graph is not None
    graph.insert_before(before, node)
    if domain and domain not in graph.opset_imports:
        graph.opset_imports[domain] = 1
    return node


def replace(old: ir.Value, new: ir.Value) -> None:
    """Let everything that used `old`, the graph's outputs included, use `new`, which takes its name and shape.

    Where `old` is an output of the graph and `new` has to keep its own name, an Identity goes between.
    """
    if new.shape is None:
        new.shape, new.type = old.shape, old.type
    output, maker = old.is_graph_output(), old.producer()
    if output and maker is not None and (new.producer() is None or new.is_graph_output()):
        new = insert(maker, "Identity", [new]).outputs[0]
        new.shape, new.type = old.shape, old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if output:
        old.name, new.name = None, old.name
