"""Exports with copied layers and without, and what two graphs compute, compared without running them."""

import hashlib

from specbuild.builder.frontend import export as exporting
from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.repeated_layers import Repeated

CAPACITY = 40


def graphs(model, monkeypatch):
    """The graph as it is exported, the one that a trace of every layer gives, and which layers were copied."""
    real, found = exporting.repeated, list[Repeated | None]()

    def noted(*given):
        found.append(real(*given))
        return found[-1]

    monkeypatch.setattr(exporting, "repeated", noted)
    given = probe(model.config, CAPACITY), CAPACITY, CAPACITY
    copied = exporting.export(model, *given)
    monkeypatch.setattr(exporting, "repeated", lambda *given: None)
    (copies,) = found
    return copied, exporting.export(model, *given), copies


def meanings(graph):
    """Each output as a hash of all that it is computed from."""
    known = {}
    for value in graph.inputs:
        known[value] = str(value.name)
    for value in graph.initializers.values():
        assert value.const_value is not None
        array = value.const_value.numpy()
        known[value] = hashlib.sha256(array.tobytes() + repr((array.shape, array.dtype)).encode()).hexdigest()
    for node in graph:
        inputs = [known[value] if value else None for value in node.inputs]
        attributes = sorted((name, repr(each.value)) for name, each in node.attributes.items())
        for index, value in enumerate(node.outputs):
            said = repr((node.domain, node.op_type, inputs, attributes, index))
            known[value] = hashlib.sha256(said.encode()).hexdigest()
    return {str(value.name): known[value] for value in graph.outputs}


def same(copied, whole):
    """Fail unless both compute the same from the same weights, into outputs of the same names, types and shapes."""
    assert meanings(copied.graph) == meanings(whole.graph)
    names = [{name for name in each.graph.initializers if not name.startswith("val_")} for each in (copied, whole)]
    assert names[0] == names[1]  # of weights; a constant's is a number
    outputs = [[(value.name, value.dtype, value.shape) for value in each.graph.outputs] for each in (copied, whole)]
    assert outputs[0] == outputs[1]
