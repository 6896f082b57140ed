"""Merges several matrix products of one input into one: the base of FuseQKV and FuseGateUp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from .pattern import TRANSPOSED, FusionPass, constant, dims, initializer, insert, numbers_of, producer, recipe, replace


class MergeProducts(FusionPass):
    """Merges the `MatMul`s behind the first `count` inputs of a node in `operators` into one, followed by a `Split`.

    `through`: operators that may lie between. `forms`: each weight's form by its name, where they differ; only weights
    of one form are merged. Post: no node has such products of one input behind it.
    """

    operators: frozenset[str]
    through: frozenset[str]
    count: int
    left = "has products of one input behind it"

    def __init__(self, forms: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self.forms = forms or {}

    def find(self, node: ir.Node) -> list[ir.Node]:
        """Return the products to merge; [] if one is missing, used twice, of another input, or the graph's output."""
        if node.op_type not in self.operators:
            return []
        found = [_product_behind(value, self.through) for value in node.inputs[: self.count]]
        products = [product for product in found if product and not product.outputs[0].is_graph_output()]
        same = len({product.inputs[0] for product in products}) == 1
        forms = {self.forms.get(str(product.inputs[1].name).removesuffix(TRANSPOSED)) for product in products}  # type: ignore
        return products if same and len(set(products)) == self.count and len(forms) == 1 else []

    def rewrite(self, graph: ir.Graph, node: ir.Node, found: list[ir.Node]) -> None:
        """See the class."""
        _merge(graph, found)


def _product_behind(value: ir.Value | None, through: frozenset[str]) -> ir.Node | None:
    """Return the `MatMul(x, weight)` behind a value with only operators in `through` between, None if there is none.

    These are followed along their first input, an Add along either.
    """
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in through:
        if node.op_type == "Add":  # a bias, on either side
            node = next((n for n in (producer(v, "MatMul") for v in node.inputs) if n), None)
        else:
            node = node.inputs[0].producer() if node.inputs[0] is not None else None
    if node is None or node.op_type != "MatMul" or not _is_weight(node.inputs[1], 2):
        return None
    return node


def _merge(graph: ir.Graph, products: Sequence[ir.Node]) -> None:
    """Replace the products by one `MatMul`, one `Add` if each has a bias, and a `Split`."""
    weights = [product.inputs[1] for product in products]
    biases = [_bias(product) for product in products]
    before = min(products, key=list(graph).index)
    merged = insert(before, "MatMul", [before.inputs[0], _joined(graph, weights)]).outputs[0]
    ends = [product.outputs[0] for product in products]
    if all(biases):
        adds = [add for add, _ in biases if add]  # type: ignore[misc]
        ends = [add.outputs[0] for add in adds]
        joined = _joined(graph, [bias for _, bias in biases])  # type: ignore[misc]
        merged = insert(before, "Add", [merged, joined]).outputs[0]
    widths = [dims(weight)[-1] for weight in weights]  # type: ignore[index]
    sizes = constant(graph, "sizes_" + "_".join(map(str, widths)), np.array(widths, dtype=np.int64))
    split = insert(before, "Split", [merged, sizes], attributes={"axis": -1}, outputs=len(products))
    for old, new in zip(ends, split.outputs, strict=True):
        replace(old, new)
    for end in ends:
        graph.remove(end.producer(), safe=True)  # type: ignore[arg-type]
    for product in products:
        if product.graph is not None:
            graph.remove(product, safe=True)


def _is_weight(value: ir.Value | None, rank: int) -> bool:
    return value is not None and value.is_initializer() and len(dims(value) or ()) == rank


def _bias(product: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """Return the Add that is a product's only user, and the bias vector that it adds; None without one."""
    uses = list(product.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "Add":
        return None
    other = uses[0].node.inputs[1 - uses[0].idx]
    whole = _is_weight(other, 1) and dims(other) == (dims(product.inputs[1]) or [])[-1:]
    return (uses[0].node, other) if whole else None  # type: ignore[return-value]


def _joined(graph: ir.Graph, values: Sequence[ir.Value | None]) -> ir.Value:
    """Return an initializer that joins others along the last axis; it is made once, and joined when it is written."""
    name = "+".join(str(value.name) for value in values if value is not None)
    if name in graph.initializers:
        return graph.initializers[name]
    parts = [value for value in values if value is not None]
    shapes = [[int(size) for size in dims(part) or ()] for part in parts]
    whole = [*shapes[0][:-1], sum(shape[-1] for shape in shapes)]
    dtype = parts[0].dtype
    assert dtype is not None
    return initializer(
        graph, recipe(name, dtype, whole, lambda: np.concatenate([numbers_of(part) for part in parts], axis=-1))
    )
