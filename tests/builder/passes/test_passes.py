"""All passes together: what they match in an exported graph, what they leave, and what cleaning removes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from graphs import SWIGLU, kinds, parse

from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.export import export
from specbuild.builder.passes import PORTABLE, census, clean, run_portable


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 3])
def test_matches_on_an_exported_graph(make_model: Callable[..., Any], layers: int) -> None:
    model = make_model(num_hidden_layers=layers)
    graph = export(model, probe(model.config, 40), 40, 40)
    assert census(graph)["ReduceMean"] == 2 * layers + 1
    assert run_portable(graph) == {
        "StaticReshape": 4 * layers,
        "GatherLogits": 1,
        "SplitGemm": 0,
        "FuseRMSNorm": 2 * layers + 1,
        "FuseRotary": layers,
        "FuseSwiGLU": layers,
        "FuseQKV": layers,
        "FuseGateUp": layers,
        "FuseResidualNorm": 2 * layers,
        "FoldTiedHead": 0,
    }
    assert census(graph) == {
        "AddRMSNorm": 2 * layers,
        "Gather": 2,
        "MatMul": 4 * layers + 1,
        "RMSNormalization": 1,
        "Reshape": 4 * layers,
        "Split": 2 * layers,
        "SwiGLU": layers,
        "Transpose": 3 * layers,
        "TreeAttention": layers,
    }
    assert not any(run_portable(graph).values())


def test_clean_removes_what_nothing_uses() -> None:
    model = parse(SWIGLU.replace("s = Sigmoid (x)", "s = Sigmoid (x)\n    unused = Neg (x)"))
    clean(model)
    assert kinds(model) == {"Sigmoid": 1, "Mul": 2}


def test_every_pass_is_run() -> None:
    assert len({kind.__name__ for kind in PORTABLE}) == 10
