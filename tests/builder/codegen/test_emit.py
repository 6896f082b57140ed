"""A fused graph lies in the bundle once for each batch size, its weights once for all, and once for both models."""

from __future__ import annotations

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

CAPACITY = 24
CACHES = Caches(CAPACITY, 20)
CONFIG = BuildConfig("t", Path("b"), draft="d", max_batch_size=2)


@pytest.fixture
def graph() -> ir.Model:
    """A random Llama of one layer, to change."""
    return fused(random_model("llama", num_hidden_layers=1), CAPACITY).clone()


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def weights(path: Path) -> dict[str, np.ndarray]:
    return {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(path).graph.initializer}


def test_batch_sizes_share_one_file_of_weights(bundle: Path) -> None:
    for name, parameters in (("target", 5.8e6), ("draft", 1.0e6)):
        assert (bundle / name / "weights.bin").stat().st_size == pytest.approx(4 * parameters, rel=0.15)
        stored = []
        for size in (1, 2, 4):
            graph = onnx.load(bundle / name / f"batch{size}.onnx", load_external_data=False).graph
            external = [t for t in graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
            stored.append({t.name: {e.key: e.value for e in t.external_data} for t in external})
            assert (bundle / name / f"batch{size}.onnx").stat().st_size < 200_000
        assert stored[0]
        assert stored[0] == stored[1] == stored[2]
        assert {entry["location"] for entry in stored[0].values()} == {"weights.bin"}


def test_two_models_apart_and_sharing(graph: ir.Model, tmp_path: Path) -> None:
    """A draft that is the target: without `stored` everything lies there twice, with it the draft adds no weights."""
    apart, sharing, stored = tmp_path / "apart", tmp_path / "sharing", dict[str, Any]()
    for name in ("target", "draft"):
        emitted = emit(apart, name, graph.clone(), CONFIG, CACHES)
        assert emitted.graphs == {"1": f"{name}/batch1.onnx", "2": f"{name}/batch2.onnx"}
        assert (emitted.engines, emitted.report, emitted.lowered["GroupQueryAttention"]) == ({}, None, 1)
        shared = emit(sharing, name, graph.clone(), CONFIG, CACHES, stored=stored)
        stored = shared.stored or {}
    assert shared.graphs == {"1": "target/draft-batch1.onnx", "2": "target/draft-batch2.onnx"}
    own = [f"{name}/{file}" for name in ("draft", "target") for file in ("batch1.onnx", "batch2.onnx", "weights.bin")]
    assert files(apart) == own
    graphs = [f"target/{prefix}batch{size}.onnx" for prefix in ("", "draft-") for size in (1, 2)]
    assert set(files(sharing)) - set(graphs) <= {"target/weights.bin", "target/draft-weights.bin"}
    assert sum((sharing / file).stat().st_size for file in files(sharing) if file.endswith("draft-weights.bin")) == 0
    expected = weights(apart / "target" / "batch1.onnx")
    for file in graphs[::2]:
        found = weights(sharing / file)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], value) for name, value in expected.items())


def test_what_a_draft_has_of_its_own_is_stored_beside(graph: ir.Model, tmp_path: Path) -> None:
    """One tensor differs; it alone is written, and both graphs have what they had."""
    first, other = emit(tmp_path, "target", graph.clone(), CONFIG, CACHES, stored={}).stored, graph.clone()
    large = max(other.graph.initializers.values(), key=lambda value: value.const_value.nbytes)  # type: ignore[union-attr]
    assert large.const_value is not None
    changed = large.const_value.numpy() + 1
    large.const_value = ir.tensor(changed, name=large.name)
    both = emit(tmp_path, "draft", other, CONFIG, CACHES, stored=first).stored
    assert first is not None
    assert both is not None
    assert len(both) == len(first) + 1
    assert (tmp_path / "target" / "draft-weights.bin").stat().st_size == changed.nbytes
    ours, theirs = (weights(tmp_path / "target" / f"{prefix}batch1.onnx") for prefix in ("", "draft-"))
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == [large.name]
    assert np.array_equal(theirs[str(large.name)], changed)


def test_other_backends_have_one_graph_of_any_batch(graph: ir.Model, tmp_path: Path) -> None:
    config = BuildConfig("t", Path("b"), backend="onnxruntime-cuda", precision="fp32", max_batch_size=3)
    emitted = emit(tmp_path, "target", graph, config, CACHES)
    assert (emitted.graphs, emitted.engines) == ({"3": "target/model.onnx"}, {})
    assert files(tmp_path) == ["target/model.onnx", "target/weights.bin"]
    assert emitted.lowered == passes.census(ir.load(tmp_path / "target" / "model.onnx"))
    assert (emitted.lowered["Attention"], emitted.lowered["TensorScatter"]) == (1, 2)


def test_what_stays_in_the_graph_file_is_of_no_other(graph: ir.Model, tmp_path: Path) -> None:
    """A small weight that lies in a file of someone else's is taken along, not named."""
    small = next(v for v in graph.graph.initializers.values() if v.const_value and 0 < v.const_value.nbytes < 1024)
    content = small.const_value.numpy()
    (small.const_value,) = ir.external_data.convert_tensors_to_external([small.const_value], tmp_path, "other.bin")
    emit(tmp_path / "b", "target", graph, CONFIG, CACHES)
    (tmp_path / "other.bin").unlink()
    for each in onnx.load(tmp_path / "b" / "target" / "batch1.onnx", load_external_data=False).graph.initializer:
        assert all(entry.value != "other.bin" for entry in each.external_data)
    found = weights(tmp_path / "b" / "target" / "batch1.onnx")
    assert any(np.array_equal(value, content) for value in found.values())
