"""Refusals, with the weights that cost most and with what would do instead."""

import re

import pytest
from small_models import random_model, random_texts

from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.quantize.assignment import assign
from specbuild.builder.quantize.calibrate import calibrate
from specbuild.builder.quantize.linears import Names
from specbuild.builder.quantize.quality import Before
from specbuild.builder.quantize.sensitivity import distance
from specbuild.builder.quantize.stage import Request, quantize_model
from specbuild.builder.quantize.texts import Texts
from specbuild.runtime.errors import ExecutionError

HELD_OUT = random_texts(3, 20)
TEXTS = Texts(random_texts(4, 24, seed=5), HELD_OUT, "here", "hash")


@pytest.fixture(scope="module")
def model():
    """One whose second layer has an input that no narrow type holds: one column is a thousand times the others."""
    made = random_model("llama", num_hidden_layers=2, hidden_size=64, intermediate_size=64)
    made.model.layers[1].mlp.up_proj.weight.data[5] *= 300
    return made


def request(precision, max_kl):
    return Request("target", precision, "onnxruntime", QuantizeOptions(), TEXTS, max_kl)


def schemes(model, precision):
    return assign(QuantizeOptions(), "target", precision, "onnxruntime", Names.of(model))


def refused(model, precision, max_kl):
    layered, given = LayeredModel.of(model), (Names.of(model), schemes(model, precision))
    before = Before.of(layered, HELD_OUT)
    with pytest.raises(ExecutionError) as caught:
        quantize_model(layered, request(precision, max_kl), *given, before, before, "id", lambda phase, share: None)
    return str(caught.value)


@pytest.mark.slow
def test_it_says_what_costs_most_and_what_would_do(model):
    layered = LayeredModel.of(model)
    before = Before.of(layered, HELD_OUT)
    precisions = "int8:static", "int8:dynamic", "int8"
    kls = {each: distance(layered, before, numbers(model, each)) for each in precisions}
    assert max(kls["int8"], kls["int8:dynamic"]) < kls["int8:static"]
    told = refused(model, "int8:static", (kls["int8"] + kls["int8:static"]) / 2)
    assert re.match(r"int8:static moves the target by \S+ nats .* --max-kl \S+, most by (model\S+, ){2}", told)
    assert f"use --precision int8, which moves it by {kls['int8']:.2g}, or allow more" in told
    assert "use --precision fp32" in refused(model, "int8", kls["int8"] / 2)


def numbers(model, precision):
    return calibrate(LayeredModel.of(model), schemes(model, precision), TEXTS.calibration)
