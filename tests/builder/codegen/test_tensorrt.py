"""TensorRT-RTX compiles real engines on a machine without a GPU, of the layers that it should."""

import importlib.util
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import onnx
import onnx_ir as ir
import pytest
from device import gpus

from specbuild.builder import passes
from specbuild.builder.codegen.tensorrt import (
    Profile,
    capacity_of,
    check_machine,
    compile_engine,
    flavour,
    make_profiles,
    profiles_of,
)
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.engine_options import EngineOptions
from specbuild.builder.frontend import checkpoint
from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.export import export
from specbuild.builder.lower.standard import lower
from specbuild.runtime.backends.gpu import cuda
from specbuild.runtime.errors import ExecutionError, OptionError

CAPACITY = 320
PROFILES = [
    Profile("plain", {"batch": (1, 1, 4), "nodes": (1, 1, 1), "logit_nodes": (1, 1, 1)}),
    Profile("tree", {"batch": (1, 1, 4), "nodes": (2, 8, 64), "logit_nodes": (1, 8, 64)}),
]
needs_rtx = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx")


@pytest.fixture(scope="module")
def graph(pair, once):
    """`graph(name, precision)`: a model of the reference pair in standard operators."""

    @cache
    def portable(name):
        found = checkpoint.find(str(pair / name))
        exported = export(checkpoint.load(found, "eager"), probe(found.config, 256), 256, CAPACITY)
        passes.run_portable(exported)
        return exported

    def make(name, precision):
        return once(f"{name}.{precision}.onnx", lambda path: ir.save(lower(portable(name), precision, CAPACITY), path))

    return make


@pytest.mark.slow
@pytest.mark.nightly(but=("draft-fp16-2",))
@needs_rtx
@pytest.mark.parametrize(
    ("name", "precision", "layers"),
    [("draft", "fp32", 2), ("draft", "fp16", 2), ("draft", "bf16", 2), ("target", "fp16", 6)],
)
def test_the_pair_compiles(graph, name, precision, layers):
    path = graph(name, precision)
    engine = compile_engine(path, "tensorrt-rtx", PROFILES)
    assert len(engine.plan) > path.stat().st_size // 2
    assert engine.version
    found = Counter(kind for _, kind in engine.layers)
    kinds = {"ATTENTION_INPUT": layers, "KV_CACHE_UPDATE": 2 * layers, "ROTARY_EMBEDDING": 2 * layers}
    assert kinds.items() <= found.items()


@pytest.mark.slow
@needs_rtx
@pytest.mark.parametrize("after", [0, 5])
def test_what_is_raised_meanwhile_ends_the_build(graph, after):
    """TensorRT itself drops what its callbacks raise, Ctrl-C included."""
    shares, options = list[float](), EngineOptions(arch=("89", "sm_120"), workspace=64, builder_optimization_level=2)

    def progress(_, share):
        shares.append(share)
        if len(shares) == after + 1:
            raise KeyboardInterrupt("enough")

    with pytest.raises(KeyboardInterrupt, match="enough"):
        compile_engine(graph("draft", "fp16"), "tensorrt-rtx", PROFILES, options, progress=progress)
    assert all(0 <= share <= 1 for share in shares)


@needs_rtx
def test_what_the_parser_refuses_has_a_name(tmp_path):
    node = onnx.helper.make_node("NonMaxSuppressed", ["x"], ["y"], name="odd_one")
    tensor = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["batch"]) for n in "xy"]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "odd", tensor[:1], tensor[1:]))
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(
        ExecutionError, match=r"tensorrt-rtx does not take odd\.onnx: node 'odd_one' \(NonMaxSuppressed\): "
    ):
        compile_engine(tmp_path / "odd.onnx", "tensorrt-rtx", [Profile("one", {"batch": (1, 1, 1)})])


@pytest.mark.slow
@needs_rtx
def test_profiles_name_every_dimension(graph):
    with pytest.raises(OptionError, match="profile 'half' has no sizes for nodes, a dimension of input_ids"):
        compile_engine(graph("draft", "fp16"), "tensorrt-rtx", [Profile("half", {"batch": (1, 1, 1)})])


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (1, 5, 4)])
def test_profiles_are_in_order(sizes):
    with pytest.raises(OptionError, match="least, usual, largest"):
        Profile("wrong", {"batch": sizes})


@pytest.mark.nightly
@needs_rtx
def test_profiles_share_the_weights(graph, pair):
    few, many = (make_profiles((1, *more), batch_size=1, chunk=512) for more in ((8,), (2, 4, 8, 16, 32, 64)))
    sizes = [len(compile_engine(graph("target", "fp16"), "tensorrt-rtx", each).plan) for each in (few, many)]
    weights = (pair / "target" / "model.safetensors").stat().st_size
    assert sizes[1] - sizes[0] < 5 * 5e6  # five more profiles, a little code each
    assert sizes[0] < 2 * weights + 2e7  # and not one copy of the weights for each


def test_paged_caches_have_a_page_more_than_all_slots_together():
    def found(rows, **more):
        engine = EngineOptions(block_size=rows)
        config = BuildConfig("t", Path("b"), backend="tensorrt", max_batch_size=3, engine=engine, **more)
        return capacity_of(config, 100), {profile.sizes["pages"] for profile in profiles_of(config, 100)}

    assert found(0) == (192, {(1, 1, 1)})
    assert found(16) == (192, {(1, 37, 37)})
    assert found(256, buckets=(1, 2, 8), tree="chain:4") == (256, {(1, 4, 4)})


@pytest.mark.skipif(gpus() > 0, reason="needs a machine without a GPU")
def test_what_needs_a_gpu_says_so_at_once():
    with pytest.raises(OptionError, match=r"tensorrt needs a GPU to build, and here "):
        check_machine("tensorrt", EngineOptions())


@needs_rtx
def test_what_this_gpu_or_disk_lacks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", flavour("tensorrt-rtx"))
    monkeypatch.setattr(cuda, "check_driver", lambda: None)
    monkeypatch.setattr(cuda, "Cuda", lambda: SimpleNamespace(capability="86", close=lambda: None))
    for lack, options in (("sm_86 has no FP8", {}), ("folder is missing", {"timing_cache": tmp_path / "none" / "a"})):
        with pytest.raises(OptionError, match=lack):
            check_machine("tensorrt", EngineOptions(**options), fp8=not options)


def test_a_missing_flavour_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(OptionError, match=r"tensorrt-rtx is not installed .*: pip install tensorrt-rtx"):
        flavour("tensorrt-rtx")


@pytest.mark.slow
@needs_rtx
def test_an_engine_for_other_gpus_may_stream_its_weights(graph):
    options = EngineOptions(arch=("89",), workspace=64, builder_optimization_level=0, weight_streaming=True)
    assert compile_engine(graph("draft", "fp16"), "tensorrt-rtx", PROFILES[:1], options).plan
