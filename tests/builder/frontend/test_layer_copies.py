"""A graph with copied layers is the one that a trace of every layer gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
from graph_meanings import graphs, same

from specbuild.builder.frontend.layer_copies import NotRepeatedError, copy_layers
from specbuild.builder.frontend.repeated_layers import Repeated

Make = Callable[..., Any]


def check(model: Any, monkeypatch: pytest.MonkeyPatch, traced: list[int]) -> None:
    copied, whole, copies = graphs(model, monkeypatch)
    assert copies
    assert copies.traced == traced
    same(copied, whole)


@pytest.mark.nightly
def test_a_llama(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    check(make_model(num_hidden_layers=5), monkeypatch, [0, 1])


@pytest.mark.soak
@pytest.mark.nightly
def test_where_more_goes_from_layer_to_layer_all_are_traced(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(num_hidden_layers=5)
    kept = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        kept[:] = [output]

    model.model.layers[0].register_forward_hook(keep)
    model.model.norm.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + kept[0],))
    copied, whole, copies = graphs(model, monkeypatch)
    assert copies
    same(copied, whole)


def test_a_graph_that_has_no_such_layers(make_model: Make) -> None:
    model = make_model(num_hidden_layers=4)
    found = Repeated("model.model.layers", model.model.layers, {2: 1, 3: 1})
    with pytest.raises(NotRepeatedError):
        copy_layers(ir.Graph([], [], nodes=[]), found, model, {}, [])
