"""TensorRT-RTX compiles real engines on a machine without a GPU, of the layers that it should."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from specbuild.builder import checkpoint, passes
from specbuild.builder.compile import Profile, architectures, compile_engine, flavour
from specbuild.builder.export import export
from specbuild.builder.layout import probe
from specbuild.builder.lower.standard import lower
from specbuild.runtime.errors import ExecutionError, OptionError

CAPACITY = 320
PROFILES = [
    Profile("plain", {"batch": (1, 1, 4), "nodes": (1, 1, 1), "logit_nodes": (1, 1, 1)}),
    Profile("tree", {"batch": (1, 1, 4), "nodes": (2, 8, 64), "logit_nodes": (1, 8, 64)}),
]
needs_rtx = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx")


@pytest.fixture(scope="module")
def graphs(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reference pair's graphs in standard operators, by model and precision."""
    folder, made = tmp_path_factory.mktemp("graphs"), {}
    for name, precisions in (("draft", ("fp32", "fp16", "bf16")), ("target", ("fp16",))):
        found = checkpoint.find(str(pair / name))
        graph = export(checkpoint.load(found, "eager"), probe(found.config, 256), 256, CAPACITY)
        passes.run_portable(graph)
        for precision in precisions:
            made[f"{name}, {precision}"] = folder / f"{name}.{precision}.onnx"
            ir.save(lower(graph, precision, CAPACITY), made[f"{name}, {precision}"])
    return made


@needs_rtx
@pytest.mark.parametrize(
    ("name", "layers"), [("draft, fp32", 2), ("draft, fp16", 2), ("draft, bf16", 2), ("target, fp16", 6)]
)
def test_the_pair_compiles(graphs: dict[str, Path], name: str, layers: int) -> None:
    engine = compile_engine(graphs[name], "tensorrt-rtx", PROFILES)
    assert len(engine.plan) > graphs[name].stat().st_size // 2
    assert engine.version
    found = engine.layers
    assert (found["ATTENTION_INPUT"], found["KV_CACHE_UPDATE"], found["ROTARY_EMBEDDING"]) == (
        layers,
        2 * layers,
        2 * layers,
    )


@needs_rtx
def test_targets_and_progress(graphs: dict[str, Path]) -> None:
    seen: list[tuple[str, float]] = []
    compile_engine(graphs["draft, fp16"], "tensorrt-rtx", PROFILES[:1], ("89", "120"), lambda *step: seen.append(step))
    assert seen
    assert all(0 <= share <= 1 for _, share in seen)


@needs_rtx
def test_what_the_parser_refuses_has_a_name(tmp_path: Path) -> None:
    node = onnx.helper.make_node("NonMaxSuppressed", ["x"], ["y"], name="odd_one")
    tensor = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["batch"]) for n in "xy"]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "odd", tensor[:1], tensor[1:]))
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(
        ExecutionError, match=r"tensorrt-rtx does not take odd\.onnx: node 'odd_one' \(NonMaxSuppressed\): "
    ):
        compile_engine(tmp_path / "odd.onnx", "tensorrt-rtx", [Profile("one", {"batch": (1, 1, 1)})])


@needs_rtx
def test_profiles_name_every_dimension(graphs: dict[str, Path]) -> None:
    with pytest.raises(OptionError, match="profile 'half' has no sizes for nodes, a dimension of input_ids"):
        compile_engine(graphs["draft, fp16"], "tensorrt-rtx", [Profile("half", {"batch": (1, 1, 1)})])


@pytest.mark.parametrize("sizes", [(0, 1, 1), (2, 1, 4), (1, 5, 4)])
def test_profiles_are_in_order(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(OptionError, match="least, usual, largest"):
        Profile("wrong", {"batch": sizes})


@pytest.mark.parametrize(
    ("wanted", "found"), [([], ()), (["portable"], ()), (["89,sm_120", "89"], ("89", "120")), (["sm_75"], ("75",))]
)
def test_architectures(wanted: list[str], found: tuple[str, ...]) -> None:
    assert architectures(wanted) == found


@pytest.mark.parametrize(("wanted", "message"), [(["90"], "has no sm_90: use 75"), (["portable", "89"], "not both")])
def test_architectures_refused(wanted: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        architectures(wanted)


def test_a_missing_flavour_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("specbuild.builder.compile.importlib.import_module", missing)
    with pytest.raises(OptionError, match=r"tensorrt-rtx is not installed .*: pip install tensorrt-rtx"):
        flavour("tensorrt-rtx")
