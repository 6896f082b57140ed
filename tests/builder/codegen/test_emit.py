"""A model is one graph for all batch sizes beside its weights, which lie in the bundle once for both models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from small_models import fused, random_model

from specbuild.builder import passes
from specbuild.builder.codegen.emit import Caches, emit
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.engine_options import EngineOptions
from specbuild.builder.units import in_bytes

CAPACITY = 24
CACHES = Caches(CAPACITY, 20)
CONFIG = BuildConfig("t", Path("b"), draft="d", max_batch_size=2)


@pytest.fixture
def graph():
    """A random Llama of one layer, to change."""
    return fused(random_model("llama", num_hidden_layers=1), CAPACITY).clone()


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def weights(path):
    return {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}


def test_a_model_is_one_graph_beside_its_weights(bundle):
    for name, parameters in (("target", 5.8e6), ("draft", 1.0e6)):
        assert (bundle / name / "weights.bin").stat().st_size == pytest.approx(4 * parameters, rel=0.15)
        assert (bundle / name / "model.onnx").stat().st_size < 200_000
        graph = onnx.load(bundle / name / "model.onnx", load_external_data=False).graph
        external = [each for each in graph.initializer if each.data_location == onnx.TensorProto.EXTERNAL]
        assert {entry.value for each in external for entry in each.external_data if entry.key == "location"} == {
            "weights.bin"
        }


GPU = BuildConfig("t", Path("b"), backend="onnxruntime-cuda", precision="fp16", cuda_arch=("none",))
NATIVE = replace(GPU, engine=EngineOptions(attention="native"))


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, GPU, NATIVE], ids=["CPU", "parts", "graph"])
def test_writing_tells_bytes_and_the_share_that_is_written(tmp_path, config):
    graph, told = fused(random_model("llama", num_hidden_layers=1, head_dim=64), CAPACITY), list[tuple[str, float]]()
    emit(tmp_path, "target", graph, config, CACHES, lambda phase, share: told.append((phase, share)))
    size = (tmp_path / "target" / "weights.bin").stat().st_size
    assert {phase for phase, _ in told} == {f"writing {in_bytes(size)}"}
    shares = [share for _, share in told]
    assert shares == sorted(set(shares))
    assert (shares[0], len(shares) > 5, shares[-1] < 1) == (0, True, True)


def test_two_models_apart_and_sharing(graph, tmp_path):
    """A draft that is the target: without `stored` everything lies there twice, with it the draft adds no weights."""
    apart, sharing, stored = tmp_path / "apart", tmp_path / "sharing", dict[str, Any]()
    for name in ("target", "draft"):
        emitted = emit(apart, name, graph.clone(), CONFIG, CACHES)
        assert emitted.graphs == dict.fromkeys("12", f"{name}/model.onnx")
        assert (emitted.engines, emitted.report, emitted.lowered["TreeAttention"]) == ({}, None, 1)
        shared = emit(sharing, name, graph.clone(), CONFIG, CACHES, stored=stored)
        stored = shared.stored or {}
    assert shared.graphs == dict.fromkeys("12", "target/draft-model.onnx")
    own = [f"{name}/{file}" for name in ("draft", "target") for file in ("model.onnx", "weights.bin")]
    assert files(apart) == own
    graphs = [f"target/{prefix}model.onnx" for prefix in ("", "draft-")]
    assert set(files(sharing)) - set(graphs) <= {"target/weights.bin", "target/draft-weights.bin"}
    assert sum((sharing / file).stat().st_size for file in files(sharing) if file.endswith("draft-weights.bin")) == 0
    expected = weights(apart / "target" / "model.onnx")
    for file in graphs:
        found = weights(sharing / file)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], value) for name, value in expected.items())


def test_what_a_draft_has_of_its_own_is_stored_beside(graph, tmp_path):
    """One tensor differs; it alone is written, and both graphs have what they had."""
    first, other = emit(tmp_path, "target", graph.clone(), CONFIG, CACHES, stored={}).stored, graph.clone()
    norm = next(v for v in other.graph.initializers.values() if len(v.shape or ()) == 2 and not v.producer())
    changed = norm.const_value.numpy() + 1
    norm.const_value = ir.tensor(changed, name=norm.name)
    both = emit(tmp_path, "draft", other, CONFIG, CACHES, stored=first).stored
    assert first is not None
    assert both is not None
    assert len(both) == len(first) + 1
    assert changed.nbytes <= (tmp_path / "target" / "draft-weights.bin").stat().st_size < 2 * changed.nbytes
    ours, theirs = (weights(tmp_path / "target" / f"{prefix}model.onnx") for prefix in ("", "draft-"))
    assert len([name for name in ours if not np.array_equal(ours[name], theirs[name])]) == 1


def test_other_backends_have_one_graph_of_any_batch(graph, tmp_path):
    config = BuildConfig("t", Path("b"), backend="onnxruntime-cuda", precision="fp32", max_batch_size=3)
    emitted = emit(tmp_path, "target", graph, config, CACHES)
    assert (emitted.graphs, emitted.engines) == ({"3": "target/model.onnx"}, {})
    assert files(tmp_path) == ["target/model.onnx", "target/weights.bin"]
    assert emitted.lowered == passes.census(ir.load(tmp_path / "target" / "model.onnx"))
    assert (emitted.lowered["Attention"], emitted.lowered["TensorScatter"]) == (1, 2)


def test_what_stays_in_the_graph_file_is_of_no_other(graph, tmp_path):
    """A small weight that lies in a file of someone else's is taken along, not named."""
    small = next(v for v in graph.graph.initializers.values() if v.const_value and 0 < v.const_value.nbytes < 1024)
    content = small.const_value.numpy()
    (small.const_value,) = ir.external_data.convert_tensors_to_external([small.const_value], tmp_path, "other.bin")
    emit(tmp_path / "b", "target", graph, CONFIG, CACHES)
    (tmp_path / "other.bin").unlink()
    for each in onnx.load(tmp_path / "b" / "target" / "model.onnx", load_external_data=False).graph.initializer:
        assert all(entry.value != "other.bin" for entry in each.external_data)
    found = weights(tmp_path / "b" / "target" / "model.onnx")
    assert any(np.array_equal(value, content) for value in found.values())
