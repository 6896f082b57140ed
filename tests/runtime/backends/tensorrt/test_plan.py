"""What is checked of a plan before it runs, and what the real TensorRT says of plans that do not load."""

import ast
import inspect
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum, IntEnum, IntFlag
from pathlib import Path

import numpy as np
import onnx
import pytest
from device import gpus
from onnx import TensorProto, helper

from specbuild.runtime.backends.gpu.cuda import Cuda
from specbuild.runtime.backends.gpu.tensors import TensorInfo
from specbuild.runtime.backends.kernels.library import PLUGIN_VERSION
from specbuild.runtime.backends.tensorrt import model, plan
from specbuild.runtime.backends.tensorrt.plan import (
    Plan,
    PlanFile,
    check_architecture,
    check_attention,
    check_profiles,
    check_version,
    deserialise,
    flavour,
    invalidity,
    limit_weights,
    load_plugin,
    logger,
)
from specbuild.runtime.bundle.backend import BACKENDS
from specbuild.runtime.bundle.manifest import EngineRecord
from specbuild.runtime.errors import BundleError, ExecutionError, OptionError

RTX = BACKENDS["tensorrt-rtx"]
RECORD = EngineRecord("1.7.1.116", ["86", "89"], "native", None, False, None, 0, {"nodes1": {"nodes": [1, 1, 1]}})
# Which class of TensorRT the sources call by which name, and what not every flavour has.
NAMES = {
    "trt": None,
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "config": "IRuntimeConfig",
    "inspector": "EngineInspector",
    "registry": "IPluginRegistry",
}
RTX_ALONE = {
    "get_engine_validity",
    "EngineInvalidityDiagnostics",
    "EngineValidity",
    "cuda_graph_strategy",
    "CudaGraphStrategy",
    "dynamic_shapes_kernel_specialization_strategy",
    "DynamicShapesKernelSpecializationStrategy",
}


def used():
    """Every attribute that the sources ask of TensorRT's objects, by the name they give them."""
    found = set()
    for module in (plan, model):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if name.lstrip("_") in NAMES:
                    found.add((name.lstrip("_"), node.attr))
    return found


@pytest.mark.parametrize("name", ["tensorrt_rtx", "tensorrt_lean"])
def test_the_real_modules_have_what_is_used(name):
    module = pytest.importorskip(name)
    calls = used()
    assert {owner for owner, _ in calls} == set(NAMES)
    for owner, attribute in sorted(calls):
        kind = NAMES[owner]
        if name == "tensorrt_lean" and (attribute in RTX_ALONE or kind == "EngineInspector"):
            continue  # the lean runtime has the inspector's class, but does not export its name
        assert hasattr(getattr(module, kind) if kind else module, attribute), f"{kind or name}.{attribute}"


@pytest.mark.parametrize(("size", "reason"), [(0, "it is cut off"), (64, "it is cut off"), (4096, "malformed engine")])
def test_a_damaged_plan_is_one_line(tmp_path, capfd, size, reason):
    module = pytest.importorskip("tensorrt_rtx")
    (tmp_path / "target.plan").write_bytes(b"x" * size)
    with pytest.raises(BundleError, match=rf"target\.plan does not load in tensorrt-rtx 1\..*: {reason}; build"):
        deserialise(module, RTX, PlanFile.at(tmp_path / "target.plan"), False)
    assert capfd.readouterr() == ("", "")


class Flavour:
    """What a plan's header is said to be, and the log's kinds of messages."""

    EngineValidity = Enum("EngineValidity", "VALID SUBOPTIMAL INVALID")
    EngineInvalidityDiagnostics = IntFlag("EngineInvalidityDiagnostics", "VERSION_MISMATCH UNSUPPORTED_CC")

    class ILogger:
        ERROR, VERBOSE = IntEnum("Severity", "ERROR VERBOSE")

    def __init__(self, validity="VALID", flags=0):
        self.said = self.EngineValidity[validity], flags

    def get_engine_validity(self, header):
        assert len(header) == 64
        return self.said


@pytest.mark.parametrize(
    ("validity", "flags", "reason", "warns"),
    [
        ("VALID", 0, "", False),
        ("SUBOPTIMAL", 2, "", True),
        ("INVALID", 3, "version mismatch, unsupported cc", False),
        ("INVALID", 0, "invalid", False),
    ],
)
def test_a_plan_that_is_merely_suboptimal_is_taken(logged, validity, flags, reason, warns):
    said = Flavour(validity, flags)
    assert invalidity(said, said, PlanFile("target.plan", bytes(100))) == reason
    assert ["slower than one that is built for this GPU" in each.getMessage() for each in logged()] == [True] * warns


def test_its_own_log_is_there_for_whoever_wants_it(monkeypatch, capsys):
    """Every message then, and otherwise none; the first error is the reason either way."""
    log = logger(Flavour)
    for wanted, printed in ((None, ""), ("verbose", "Flavour: VERBOSE: chose a tactic\nFlavour: ERROR: no  room\n")):
        monkeypatch.setenv("SPECBUILD_TENSORRT_LOG", wanted) if wanted else None
        log.clear()
        log.log(Flavour.ILogger.VERBOSE, "chose a tactic")
        log.log(Flavour.ILogger.ERROR, "no  room")
        log.log(Flavour.ILogger.ERROR, "so nothing was made")
        assert log.reason == "no room"
        assert capsys.readouterr().err == (printed and printed + "Flavour: ERROR: so nothing was made\n")


def test_a_flavour_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(BundleError, match=r"the bundle needs tensorrt-rtx .*: pip install tensorrt-rtx"):
        flavour(RTX)


@pytest.mark.parametrize(
    ("backend", "compatible", "fits", "other"),
    [
        ("tensorrt-rtx", False, ("1.7.1.116",), "1.7.1.117"),
        ("tensorrt", False, ("1.7.1.116",), "1.7.2.0"),
        ("tensorrt", True, ("1.9.0.0",), "2.0.0.0"),
    ],
)
def test_versions(backend, compatible, fits, other):
    record = replace(RECORD, version_compatible=compatible)
    for installed in fits:
        check_version(BACKENDS[backend], record, installed)
    with pytest.raises(BundleError, match=rf"by {backend} 1\.7\.1\.116, installed is {re.escape(other)}: pip"):
        check_version(BACKENDS[backend], record, other)


@pytest.mark.parametrize(
    ("built", "hardware", "fits", "other"),
    [
        (["86", "89"], None, "89", "120"),
        (["90a"], None, "90", "89"),
        ([], None, "120", "90"),  # TensorRT-RTX lists those that it has
        (["80"], "ampere-plus", "120", "75"),
        (["86"], "same-compute-capability", "86", "89"),
    ],
)
def test_architectures(built, hardware, fits, other):
    record = replace(RECORD, architectures=built, hardware_compatible=hardware)
    check_architecture(RTX, record, fits)
    with pytest.raises(BundleError, match=f"compiled for sm_{(built or ['75'])[0][:2]}.*this GPU is sm_{other}: build"):
        check_architecture(RTX, record, other)


@pytest.mark.parametrize(("attention", "more"), [("native", []), ("plugin", ["tree"]), ("plugin", ["tree", "pages"])])
def test_profiles_are_the_record_s(attention, more):
    sizes = {"batch": [1, 1, 2], "nodes": [4, 4, 4], **{name: [1, 9, 9] for name in more}}
    record = replace(RECORD, attention=attention, profiles={"nodes4": sizes}, block_size=16 * ("pages" in more))
    found = {name: tuple(each) for name, each in sizes.items()}
    check_profiles(record, [found])
    for name in sizes:
        for wrong in ([found | {name: (1, 2, 3)}], [{n: size for n, size in found.items() if n != name}], []):
            with pytest.raises(BundleError, match=r"the plan has profiles .* its record .*: build the bundle again"):
                check_profiles(record, wrong)


@pytest.mark.parametrize(
    ("attention", "plugin", "cache", "named"),
    [
        *(("native", None, {}, None), ("plugin", "1", {}, None), ("plugin", "1", {"kv_cache_dtype": "fp8"}, None)),
        ("plugin", "1", {"block_size": 16}, None),
        ("plugin", "2", {}, "plugin 2, this specbuild has native and plugin 1: build the"),
        *(("plugin", None, {}, "plugin, this specbuild has native"), ("native", "1", {}, "native 1, this")),
        (
            "native",
            None,
            {"kv_cache_dtype": "fp8"},
            "native over caches of fp8, this specbuild has fp8 with plugin alone",
        ),
        (
            "native",
            None,
            {"block_size": 16},
            "native over pages of 16 rows, this specbuild has 16, .*, 256 with plugin",
        ),
        ("plugin", "1", {"block_size": 48}, "plugin over pages of 48 rows"),
    ],
)
def test_attention_is_this_specbuild_s(attention, plugin, cache, named):
    refused = pytest.raises(BundleError, match=f"^the plan's attention is {named}") if named else nullcontext()
    with refused:
        check_attention(replace(RECORD, attention=attention, plugin=plugin, **cache))


def test_the_plugin_s_version_is_its_source_s():
    source = Path(__file__).parents[4] / "plugins" / "trt"
    found = re.findall(r'kVersion\[\] = "(\w+)"', (source / "plugin.h").read_text(encoding="utf-8"))
    assert found == [PLUGIN_VERSION]


def test_a_library_that_is_missing_or_none(tmp_path, monkeypatch):
    lean = pytest.importorskip("tensorrt_lean")
    monkeypatch.setattr(plan, "find_library", lambda name: None)
    with pytest.raises(
        ExecutionError, match=r"^TreeAttention's libspecbuild_plugin.so is not installed: .* -DSPECBUILD_TENSORRT=ON"
    ):
        load_plugin(lean)
    monkeypatch.setattr(plan, "find_library", tmp_path.joinpath)
    (tmp_path / "libspecbuild_plugin.so").write_bytes(b"no library")
    with pytest.raises(ExecutionError, match=r"plugin\.so has no TreeAttention 1 for TensorRT \d.*: compile it"):
        load_plugin(lean)


class Streaming:
    """An engine's weights, of which it takes whole `steps` alone."""

    def __init__(self, streamable, step=1):
        self.streamable_weights_size, self._step, self._budget = streamable, step, streamable

    @property
    def weight_streaming_budget_v2(self):
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget):
        if budget % self._step == 0:
            self._budget = budget


def test_weights_are_streamed_where_the_plan_was_built_for_it():
    engine = Streaming(1000)
    limit_weights(engine, "model.plan", 0.25)
    assert engine.weight_streaming_budget_v2 == 250
    with pytest.raises(OptionError, match="keeps all weights on the GPU: build it with --weight-streaming"):
        limit_weights(Streaming(0), "model.plan", 0.25)
    with pytest.raises(ExecutionError, match="TensorRT does not keep 0 MiB of"):
        limit_weights(Streaming(1000, 300), "model.plan", 0.25)


@pytest.fixture
def doubling(tmp_path):
    """A plan for this machine's GPU that adds `input_ids` to themselves, in steps of one node or of up to four."""
    trt = flavour(RTX)
    names, dims = ("input_ids", "sums"), ["batch", "nodes"]
    ends = [helper.make_tensor_value_info(name, TensorProto.INT32, dims) for name in names]
    graph = helper.make_graph([helper.make_node("Add", ["input_ids"] * 2, ["sums"])], "toy", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "toy.onnx")
    builder = trt.Builder(logger(trt))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    assert trt.OnnxParser(network, logger(trt)).parse_from_file(str(tmp_path / "toy.onnx"))
    config = builder.create_builder_config()
    for nodes in (1, 4):
        profile = builder.create_optimization_profile()
        profile.set_shape("input_ids", (1, 1), (1, nodes), (2, nodes))
        config.add_optimization_profile(profile)
    (tmp_path / "toy.plan").write_bytes(builder.build_serialized_network(network, config))
    return tmp_path / "toy.plan"


@pytest.mark.gpu
@pytest.mark.skipif(not gpus(), reason="needs an NVIDIA GPU and its driver")
def test_a_plan_on_a_gpu(doubling, tmp_path):
    """What it says of itself, a step, and what a context refuses; what was compiled for it is saved."""
    device = Cuda()
    stream, plan = device.stream(), Plan(doubling, RTX, RECORD, device, cache=tmp_path / "cache" / "toy")
    assert plan.profiles == [{"batch": (1, 1, 2), "nodes": (1, most, most)} for most in (1, 4)]
    assert plan.tensors == {name: TensorInfo("INT32", (-1, -1), None) for name in ("input_ids", "sums")}
    assert len(plan.inspect()) >= 1
    context = plan.context(1, device.empty((max(plan.scratch_bytes, 1),), np.uint8), stream)
    ids, found = device.pinned((2, 3), np.int32), device.pinned((2, 3), np.int32)
    ids[:] = np.arange(6).reshape(2, 3)
    tensors = {name: device.empty(ids.shape, np.int32) for name in plan.tensors}
    device.upload(tensors["input_ids"], ids, stream)
    plan.call(context.set_input_shape, "input_ids", ids.shape)
    for name, tensor in tensors.items():
        plan.call(context.set_tensor_address, name, tensor.address)
    plan.call(context.execute_async_v3, stream)
    device.download(found, tensors["sums"], stream)
    device.wait(stream)
    assert found.tolist() == [[0, 2, 4], [6, 8, 10]]
    with pytest.raises(ExecutionError, match="TensorRT failed in set_input_shape: "):
        plan.call(context.set_input_shape, "input_ids", (3, 3))
    plan.keep_compiled()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["toy"]
    del context
    plan.close()
    with pytest.raises(OptionError, match="keeps all weights on the GPU"):
        Plan(doubling, RTX, RECORD, device, weights=0.5)
    device.close()
