"""The target's graph for a GPU is held against PyTorch here, and 16 bits widen the bound."""

import numpy as np
import pytest
import torch
from small_models import fused, random_model, random_texts

from specbuild.builder.check.graph_check import check_graph
from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.quantize.assignment import assign
from specbuild.builder.quantize.calibrate import calibrate
from specbuild.builder.quantize.linears import Names, simulated
from specbuild.builder.quantize.quality import Before
from specbuild.builder.quantize.rewrite import Quantize
from specbuild.builder.quantize.stage import Quantization
from specbuild.runtime.errors import ExecutionError

CAPACITY = 24
TEXTS = [[5, 17, 3, 88, 42, 9, 9], [61, 4, 4, 8]]


@pytest.fixture
def model():
    return LayeredModel.of(random_model("llama", num_hidden_layers=1))


@pytest.fixture
def graph():
    """Of a model of its own with the same weights: the graph is kept for other tests."""
    return fused(random_model("llama", num_hidden_layers=1), CAPACITY).clone()


@pytest.mark.nightly
def test_float32_keeps_its_bound(model, graph):
    found = check_graph(graph, CAPACITY, model, "fp32", Before.of(model, TEXTS))
    assert found.difference is not None
    assert 0 < found.difference < 1e-4
    assert (found.bound, found.fp8_caches, found.moved) == (0.0, None, {})


@pytest.mark.slow
def test_16_bits_widen_it(model, graph):
    references = Before.of(model, TEXTS)
    found = check_graph(graph, CAPACITY, model, "bf16", references)
    assert found.bound > 1e-3


@pytest.mark.slow
def test_another_models_graph_is_refused(model, graph):
    other = Before(TEXTS, [logits + 0.5 for logits in Before.of(model, TEXTS).logits])
    with pytest.raises(ExecutionError, match="logits differ from Hugging Face's"):
        check_graph(graph, CAPACITY, model, "fp32", other)


@pytest.mark.slow
def test_a_quantized_graph_is_held_against_the_same_numbers_in_pytorch(model, graph):
    """Which move the model, and are no fault of the graph; the model is as it was afterwards."""
    names, references = Names.of(model.net), Before.of(model, TEXTS)
    found = calibrate(model, assign(QuantizeOptions(), "target", "int8", "tensorrt-rtx", names), random_texts())
    numbers = Quantization(names, found, Before.of(model, random_texts(2)), [], [])
    before = {name: weight.clone() for name, weight in model.net.named_parameters()}
    Quantize(found, names)(graph)
    checked = check_graph(graph, CAPACITY, model, "fp32", references, numbers)
    assert checked.difference is not None
    assert checked.difference < 1e-3
    assert checked.moved["kl_nats_per_token"] > 0
    with simulated(model, found) as changed:
        moved = changed.logits(TEXTS)
    assert not np.allclose(moved[0][0], references.logits[0][0], atol=10 * checked.difference)
    assert all(torch.equal(weight, before[name]) for name, weight in model.net.named_parameters())
