"""A model cut at its attentions: every operator is in one part, no weight in any, and layers of one form are alike."""

from __future__ import annotations

import onnx_ir as ir
import onnxruntime
import pytest
from plugin_lowering import CAPACITY, MODELS, fused, make

from specbuild.builder.lower import parts

pytestmark = pytest.mark.nightly
LIKE = [name for name in MODELS if name not in ("gqa", "norms after the transpose, two tables")]  # for the soak


def attends(node: ir.Node) -> bool:
    return node.op_type == "TreeAttention"


@pytest.mark.soak(only=[f"{precision}-{name}" for precision in ("fp16", "bf16") for name in LIKE])
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_parts_are_the_whole(family: str, precision: str) -> None:
    """Each part reads weights, inputs and what an earlier one or an attention made; ONNX Runtime loads it."""
    kind, fields, _ = MODELS[family]
    lowered = parts.lower(fused(make(kind, **fields)), precision, CAPACITY)
    attentions = [node for node in lowered.graph if attends(node)]
    found = parts.cut(lowered)
    assert len(found) == len(attentions) + 1
    rest = sorted(node.op_type for node in lowered.graph if not attends(node))
    assert sorted(node.op_type for part in found for node in part.graph.graph) == rest
    known = {value for value in lowered.graph.inputs if not str(value.name).startswith("past_")}
    for number, part in enumerate(found):
        assert all(value in known or value.is_initializer() for value in part.inputs)
        assert not [
            each for each in part.graph.graph.initializers.values() if each.dtype.is_floating_point() and each.shape
        ]  # type: ignore
        known |= {*part.outputs}
        if number < len(attentions):
            made = [value for value in attentions[number].inputs if value is not None and not value.is_initializer()]
            assert all(value in known or value.is_graph_input() for value in made)
            known.add(attentions[number].outputs[0])
        names = [[str(value.name) for value in ends] for ends in (part.graph.graph.inputs, part.graph.graph.outputs)]
        assert names == [[f"i{n}" for n in range(len(part.inputs))], [f"o{n}" for n in range(len(part.outputs))]]
        if precision == "fp16":  # ONNX Runtime's CPU provider has no bfloat16
            onnxruntime.InferenceSession(
                ir.to_proto(part.graph).SerializeToString(), providers=["CPUExecutionProvider"]
            )
    assert [str(value.name) for value in found[-1].outputs] == ["logits"]
