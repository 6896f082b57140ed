"""GatherLogits selects the wanted nodes by one Gather along the node axis, and promises that nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import GATHER, SWIGLU, apply, kinds, normal, parse, run
from onnx_ir.passes import PostconditionError, PreconditionError

from specbuild.builder.passes import clean
from specbuild.builder.passes.gather_logits import GatherLogits


def test_the_exporters_form_is_found_once() -> None:
    assert apply(GatherLogits(), GATHER)[0] == 1


def test_one_gather_selects_the_same_rows() -> None:
    x = normal(2, 5, 4)
    feeds = {"x": x, "logit_nodes": np.array([4, 0, 2])}
    _, model = apply(GatherLogits(), GATHER)
    clean(model)
    assert kinds(model) == {"Gather": 1}
    np.testing.assert_array_equal(run(model, feeds)[0], x[:, [4, 0, 2]])
    np.testing.assert_array_equal(run(parse(GATHER), feeds)[0], x[:, [4, 0, 2]])


def test_needs_the_input_logit_nodes() -> None:
    with pytest.raises(PreconditionError, match="logit_nodes"):
        GatherLogits()(parse(SWIGLU))


def test_promises_one_gather() -> None:
    other_axes = GATHER.replace("[1, 0, 2]> (b)", "[0, 1, 2]> (b)")
    with pytest.raises(PostconditionError, match="logit_nodes"):
        GatherLogits()(parse(other_axes))
    used_twice = GATHER.replace("=> (", "=> (int64[L] same, ").replace("}", "    same = Identity (logit_nodes)\n}")
    with pytest.raises(PostconditionError, match="logit_nodes"):
        GatherLogits()(parse(used_twice))
