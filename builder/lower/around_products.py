"""Fuses what stands around a product with it: an RMSNorm before it, and after it a bias, a gate or a residual sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from specbuild.builder.passes.pattern import dims, insert, producer, replace, same
from specbuild.builder.passes.residual_norm import EPSILON

from .panels import COLUMNS

PRODUCT = "RowwiseMatMul"
_EXPERTS, _NORM, _BIAS, _RESIDUAL = 3, 4, 5, 6  # inputs after rows, codes and factors


def fuse(graph: ir.Graph) -> None:
    """Fuse every product but those of experts with its surroundings.

    Pre: sums and norms are nodes of their own. Post: the graph is sorted.
    """
    for node in list(graph):
        if _is_product(node):
            _residual(graph, _gate(graph, _bias(graph, _norm(graph, node))))
    graph.sort()


def _is_product(node: ir.Node) -> bool:
    return node.op_type == PRODUCT and (len(node.inputs) <= _EXPERTS or node.inputs[_EXPERTS] is None)


def _norm(graph: ir.Graph, product: ir.Node) -> ir.Node:
    """Fuse the norm of a product's rows with it, if only products read them."""
    norm = producer(product.inputs[0], "RMSNormalization")
    if norm is None or norm.outputs[0].is_graph_output():
        return product
    x, weight = norm.inputs
    if dims(weight) != (dims(x) or [])[-1:] or not all(_is_product(use.node) for use in norm.outputs[0].uses()):
        return product
    epsilon = norm.attributes.get("epsilon")
    new = _fused(graph, product, (), {0: x, _NORM: weight}, epsilon=epsilon.as_float() if epsilon else EPSILON)
    if not norm.outputs[0].uses():
        graph.remove(norm, safe=True)
    return new


def _bias(graph: ir.Graph, product: ir.Node) -> ir.Node:
    """Fuse a bias with the product that it is added to."""
    add, bias = _sum(product)
    if add is None or bias is None or not bias.is_initializer() or dims(bias) != [_columns(product)]:
        return product
    return _fused(graph, product, [add], {_BIAS: bias})


def _gate(graph: ir.Graph, product: ir.Node) -> ir.Node:
    """Fuse SwiGLU with the product that its gate and its other input are halves of."""
    split = _only_reader(product.outputs[0], "Split")
    readers = {_only_reader(half, "SwiGLU") for half in split.outputs} if split else set()
    gate = readers.pop() if len(readers) == 1 else None
    if split is None or gate is None or list(gate.inputs) != list(split.outputs):
        return product
    if [(dims(half) or [])[-1:] for half in split.outputs] != 2 * [[_columns(product) // 2]]:
        return product
    if _columns(product) % (2 * COLUMNS):  # each half is whole panels
        return product
    return _fused(graph, product, [split, gate], {}, gated=1)


def _residual(graph: ir.Graph, product: ir.Node) -> ir.Node:
    """Fuse a residual sum with the later one of its products."""
    add, other = _sum(product)
    if add is None or "gated" in product.attributes or not same(dims(other) or [], dims(add.outputs[0]) or []):
        return product
    return _fused(graph, product, [add], {_RESIDUAL: other})


def _fused(
    graph: ir.Graph,
    product: ir.Node,
    followers: Sequence[ir.Node],
    inputs: Mapping[int, ir.Value | None],
    **attributes: Any,
) -> ir.Node:
    """Put a product with more inputs and attributes in the place of a product and of the nodes that followed it."""
    each = dict(enumerate(product.inputs)) | dict(inputs)
    found = [each.get(index) for index in range(max(each) + 1)]
    new = insert(product, PRODUCT, found, product.domain, {**product.attributes, **attributes})
    replace((product, *followers)[-1].outputs[0], new.outputs[0])
    for node in (*reversed(followers), product):
        graph.remove(node, safe=True)
    return new


def _sum(product: ir.Node) -> tuple[ir.Node | None, ir.Value | None]:
    """Return the sum that alone reads a product, and what it adds to it."""
    add = _only_reader(product.outputs[0], "Add")
    if add is None:
        return None, None
    first, second = add.inputs
    return add, second if first is product.outputs[0] else first


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    """Return the node that reads a value, if it is the only one and of this type."""
    readers = [use.node for use in value.uses()]
    alone = len(readers) == 1 and not value.is_graph_output()
    return readers[0] if alone and readers[0].op_type == op_type else None


def _columns(product: ir.Node) -> int:
    return product.attributes["columns"].as_int()
