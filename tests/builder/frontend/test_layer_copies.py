"""A graph with copied layers is the one that a trace of every layer gives."""

import onnx_ir as ir
import pytest
from graph_meanings import graphs, same

from specbuild.builder.frontend.layer_copies import NotRepeatedError, copy_layers
from specbuild.builder.frontend.repeated_layers import Repeated


def check(model, monkeypatch, traced):
    copied, whole, copies = graphs(model, monkeypatch)
    assert copies
    assert copies.traced == traced
    same(copied, whole)


@pytest.mark.nightly
def test_a_llama(make_model, monkeypatch):
    check(make_model(num_hidden_layers=5), monkeypatch, [0, 1])


@pytest.mark.soak
@pytest.mark.nightly
def test_where_more_goes_from_layer_to_layer_all_are_traced(make_model, monkeypatch):
    model = make_model(num_hidden_layers=5)
    kept = []

    def keep(_module, _inputs, output):
        kept[:] = [output]

    model.model.layers[0].register_forward_hook(keep)
    model.model.norm.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + kept[0],))
    copied, whole, copies = graphs(model, monkeypatch)
    assert copies
    same(copied, whole)


@pytest.mark.parametrize(
    "why",
    ["has no nodes", "from layer 0 to None", "2 values go from layer 0 to 1", "Sum holds a graph", "there is no"],
)
def test_layers_that_cannot_be_copied(make_model, why):
    model = make_model(num_hidden_layers=4)
    found = Repeated("model.model.layers", model.model.layers, {2: 1, 3: 1})
    first, weight = ir.node("Split", [ir.val("x")], num_outputs=2), ir.val("model.layers.1.odd")
    weight.const_value = ir.tensor([1.0], name=weight.name)
    inner = {"body": ir.Graph([], [], nodes=[])} if "graph" in why else {}
    read = [*first.outputs[: 1 + ("2 values" in why)], *[weight][: "there" in why]]
    second = ir.node("Sum", read, inner)
    last = ir.node("Sum", [*second.outputs, *first.outputs[: "None" in why]])
    for place, node in enumerate((first, second)):
        node.metadata_props["pkg.torch.onnx.name_scopes"] = f"['{found.path}.{place}']"
    graph = ir.Graph([], [], nodes=[] if "nodes" in why else [first, second, last], initializers=[weight])
    with pytest.raises(NotRepeatedError, match=why):
        copy_layers(graph, found, model, {}, [])
