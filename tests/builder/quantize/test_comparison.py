"""Precisions next to each other: what is measured of each, and which is the best."""

import pytest
from small_models import random_model, random_texts

from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.quantize.assignment import assign
from specbuild.builder.quantize.calibrate import calibrate
from specbuild.builder.quantize.comparison import EXACT, Compared, best, compare, to_dict
from specbuild.builder.quantize.linears import Names
from specbuild.builder.quantize.quality import Before
from specbuild.runtime.errors import ExecutionError


def row(precision, size, kl, step):
    return Compared(precision, size, {"texts": kl / 2, "chat": kl}, {}, None, {"1": step, "2": 0.0})


ROWS = [
    row("int4", 10, 0.03, 5.0),
    row("int8", 20, 0.004, 4.0),
    row("int8:gptq", 20, 0.0002, 6.0),
    row(EXACT, 80, 0.0, 9.0),
]


@pytest.mark.parametrize(
    ("wanted", "max_kl", "chosen"),
    [
        ("best:size", 0.05, "int4"),
        ("best:size", 1e-9, EXACT),
        ("best:speed", 0.05, "int8"),
        ("best:speed", 0.001, "int8:gptq"),
        ("best:kl", 1e-9, "int8:gptq"),
    ],
)
def test_the_best(wanted, max_kl, chosen):
    assert best(ROWS, wanted, max_kl).precision == chosen
    slow = [row("int8", 20, 0.001, 9.5), row(EXACT, 80, 0.0, 9.0)]
    assert best(slow, "best:kl", 1.0).precision == EXACT, "nothing beats float32 where all else is slower"


@pytest.mark.parametrize("wanted", ["best:size", "best:speed"])
def test_what_is_given_by_name_may_cost_too_much_in_float32_too(wanted):
    rows = [row("int8", 20, 0.4, 4.0), row(EXACT, 80, 0.3, 9.0)]
    with pytest.raises(ExecutionError, match=r"--tensor-type alone move the target by 0\.3 nats"):
        best(rows, wanted, 0.02)


def test_what_is_measured():
    model = LayeredModel.of(random_model("llama", num_hidden_layers=1))
    names, texts = Names.of(model.net), random_texts(3, 20)
    found = {EXACT: {}}
    for precision in ("int8", "int4:rtn"):
        schemes = assign(QuantizeOptions(), "target", precision, "onnxruntime", names)
        found[precision] = calibrate(model, schemes, texts)
    before = {"texts": Before.of(model, texts), "code": Before.of(model, texts[:1])}

    def time(candidates):
        return {name: {"2": float(len(name))} for name in candidates}

    rows = compare(model, found, {EXACT: 30, "int8": 20, "int4:rtn": 10}, before, time)
    assert [(each.precision, each.bytes) for each in rows] == [("int4:rtn", 10), ("int8", 20), (EXACT, 30)]
    narrow, middle, exact = rows
    assert narrow.kl["texts"] > middle.kl["texts"] > exact.kl["texts"] == 0
    assert set(narrow.kl) == set(narrow.top1) == {"texts", "code"}
    assert exact.top1 == {"texts": 1.0, "code": 1.0}
    assert narrow.steps == {"2": 8.0}
    assert narrow.worst == max(narrow.kl.values())
    told = to_dict(rows, "best:size", narrow)
    assert (told["by"], told["chosen"]) == ("best:size", "int4:rtn")
    assert [each["precision"] for each in told["precisions"]] == ["int4:rtn", "int8", EXACT]
