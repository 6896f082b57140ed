"""Shared by the passes: a base class that counts matches, and helpers to read and edit a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes as passes
from numpy.typing import NDArray

from specbuild.builder.config.progress import Progress
from specbuild.builder.units import in_bytes
from specbuild.runtime.errors import SpecbuildError

IN_GRAPH = 256  # bytes of a weight that stays in the graph's own file
TRANSPOSED = ".T"  # suffix of an initializer's name: a transposed weight


class FusionPass(passes.InPlacePass):
    """Base of passes that rewrite nodes one by one; `matched` counts them. Subclasses implement `find` and `rewrite`.

    Pre: the graph has the inputs, outputs or operators in `needs`. Post: `find` matches no node any more; `left` says
    what is wrong with a node that it still matches.
    """

    needs: tuple[str, ...] = ()
    left: str

    def __init__(self) -> None:
        super().__init__()
        self.matched = 0

    def requires(self, model: ir.Model) -> None:
        """Raise PreconditionError if the graph lacks a name in `needs`."""
        values = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
        for name in self.needs:
            if name not in values and all(node.op_type != name for node in model.graph):
                raise passes.PreconditionError(f"the graph has no {name}")

    def call(self, model: ir.Model) -> passes.PassResult:
        """Rewrite every node that `find` matches, in order."""
        for node in list(model.graph):
            found = self.find(node) if node.graph is not None else None
            if found:
                self.rewrite(model.graph, node, found)
                self.matched += 1
        return passes.PassResult(model, modified=self.matched > 0)

    def ensures(self, model: ir.Model) -> None:
        """Raise PostconditionError for a node that `find` still matches."""
        for node in model.graph:
            if self.find(node):
                raise passes.PostconditionError(f"{node.name} {self.left}")

    def find(self, node: ir.Node) -> Any:
        """Return what `rewrite` needs if a node matches, else something false."""
        raise NotImplementedError

    def rewrite(self, graph: ir.Graph, node: ir.Node, found: Any) -> None:
        """Rewrite the graph around a node that matches; `found` is what `find` returned."""
        raise NotImplementedError


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that computes a value, None if it is not of this operator type."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


def dims(value: ir.Value | None) -> list[str | int] | None:
    """Return a value's shape, with names for dynamic dimensions; None if it is unknown."""
    if value is None or value.shape is None:
        return None
    return [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]


def same(first: Sequence[str | int], second: Sequence[str | int]) -> bool:
    """Return whether two shapes are certain to be equal; a dimension without a name may have any size."""
    return list(first) == list(second) and str(None) not in first


def permutation(node: ir.Node) -> tuple[int, ...]:
    """Return a Transpose's axes, () if it states none."""
    attribute = node.attributes.get("perm")
    return tuple(attribute.as_ints()) if attribute is not None else ()


def constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Return the initializer of this name; make it of `array` if there is none."""
    return graph.initializers[name] if name in graph.initializers else initializer(graph, ir.tensor(array, name=name))


def initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Add a tensor to a graph as a new initializer of its name."""
    shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
    value = ir.Value(name=tensor.name, type=kind, shape=shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def recipe(name: str, dtype: ir.DataType, shape: Sequence[int], make: Callable[[], NDArray[Any]]) -> ir.TensorProtocol:
    """Return a tensor that is made each time it is read, which is when it is written: a graph holds no weights."""
    return ir.LazyTensor(lambda: ir.tensor(make(), dtype=dtype, name=name), dtype, ir.Shape(shape), name=name)


def counted(
    tensors: Sequence[ir.TensorProtocol], progress: Progress
) -> Callable[[ir.TensorProtocol, ir.external_data.CallbackInfo], None]:
    """Return a callback that tells how many of the tensors' bytes were written before the one that follows."""
    total, done = sum(tensor.nbytes for tensor in tensors), 0

    def next_one(tensor: ir.TensorProtocol, _: ir.external_data.CallbackInfo) -> None:
        nonlocal done
        progress(f"writing {in_bytes(total)}", done / total)
        done += tensor.nbytes

    return next_one


def save(
    model: ir.Model, path: Path, weights: str | None = None, progress: Progress = lambda phase, share: None
) -> None:
    """Write a graph, and its large weights to another file beside it; raise an error of a recipe as it is."""
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    callback = counted([tensor for tensor in tensors if tensor.nbytes > IN_GRAPH], progress)
    try:
        ir.save(model, path, external_data=weights, size_threshold_bytes=IN_GRAPH, callback=callback)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, SpecbuildError):
            cause = cause.__cause__
        raise cause or error from None


def numbers_of(value: ir.Value | None) -> NDArray[Any]:
    """Return an initializer's numbers, made if they are a recipe's."""
    assert value is not None
    assert value.const_value is not None
    return value.const_value.numpy()


def renamed(stored: ir.ExternalTensor, name: str, shape: ir.Shape | None = None) -> ir.ExternalTensor:
    """Return a tensor over the same bytes of a file, with another name and, if given, another shape."""
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
    """Insert a new node in front of another one.

    Args:
        before: The other node.
        op_type: The new node's operator.
        inputs: Its inputs.
        domain: The operator's domain, by default ONNX's.
        attributes: Its attributes.
        outputs: Its outputs, or how many to make.
    """
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
    """Let all users of `old`, the graph's outputs included, use `new`, which takes its shape if it has none.

    If `old` is an output of the graph, `new` takes its name; if `new` has to keep its own, an Identity goes between.
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
