"""The file of parts: what it names is there, weights hold what they held, and each form of layer is stored once."""

import numpy as np
import pytest
from plugin_lowering import CAPACITY, fused, make

from specbuild.builder.codegen.parts import WEIGHTS, save_parts
from specbuild.builder.lower import parts
from specbuild.runtime.backends.onnx_graph import GraphFile
from specbuild.runtime.backends.onnxruntime_cuda.parts_file import PARTS, PartsFile

pytestmark = pytest.mark.nightly


def test_what_is_written_is_read_back(tmp_path):
    """A tied embedding is one weight, which the first part and the last read."""
    lowered = parts.lower(fused(make("llama", num_hidden_layers=3, tie_word_embeddings=True)), "fp16", CAPACITY)
    originals = {str(value.name): value.const_value.numpy() for value in lowered.graph.initializers.values()}
    (tmp_path / "target").mkdir()
    assert save_parts(tmp_path, "target", lowered) == f"target/{PARTS}"
    files = sorted(path.name for path in (tmp_path / "target").iterdir())
    assert files == ["part0.onnx", "part1.onnx", "part2.onnx", PARTS, WEIGHTS]
    found = PartsFile.read(GraphFile.at(tmp_path / "target" / PARTS))
    graphs = found.steps[::2]
    assert [part.graph for part in graphs] == ["part0.onnx", "part1.onnx", "part1.onnx", "part2.onnx"]
    data = (tmp_path / "target" / WEIGHTS).read_bytes()
    for name, weight in found.weights.items():
        array = np.frombuffer(data, weight.dtype, int(np.prod(weight.shape)), weight.offset).reshape(weight.shape)
        np.testing.assert_array_equal(array, originals[name])
    (shared,) = {*graphs[0].inputs} & {*graphs[-1].inputs} & found.weights.keys()
    assert "embed" in shared or "lm_head" in shared
    for attention in found.attentions:
        assert attention.inputs.keys() == {"qkv"}
        assert (attention.heads, attention.window) == (4, 0)
        assert attention.cos is not None
        assert found.weights[attention.cos].dtype == "float32"


def test_a_model_of_norms_before_rotation_has_three_values(tmp_path):
    (tmp_path / "draft").mkdir()
    save_parts(tmp_path, "draft", parts.lower(fused(make("qwen3")), "bf16", CAPACITY))
    found = PartsFile.read(GraphFile.at(tmp_path / "draft" / PARTS))
    assert all(attention.inputs.keys() == {"query", "key", "value"} for attention in found.attentions)
    assert {found.values[name].dtype for each in found.attentions for name in each.inputs.values()} == {"bfloat16"}
