"""What runs models on the stand-in card keeps to the rules of what it stands for; run by tests/test_card_bundles.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tensorrt_rtx as trt
from cuda.bindings import driver
from device import call, take_gpu
from onnx import TensorProto, helper

Log = Any
MODE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
SIZE, LATE = 4, "disable_synchronize_execution_providers"


@pytest.fixture(autouse=True)
def _gpu() -> None:
    take_gpu()


@pytest.fixture
def stream() -> Any:
    made = call("cuStreamCreate", 1)
    yield made
    call("cuStreamDestroy", made)


class Memory:
    """Floats on the device, in room for more."""

    def __init__(self, *numbers: float) -> None:
        self.address = int(call("cuMemAlloc", 1024))
        self.fill(*numbers)

    def fill(self, *numbers: float) -> None:
        host = np.zeros(16, np.float32)
        host[: len(numbers)] = numbers
        call("cuMemcpyHtoD", self.address, host.ctypes.data, host.nbytes)

    @property
    def now(self) -> list[float]:
        """At once, whatever is enqueued."""
        host = np.zeros(SIZE, np.float32)
        call("cuMemcpyDtoH", host.ctypes.data, self.address, host.nbytes)
        return host.tolist()


def save(path: Path, operator: str = "Add", dtype: int = TensorProto.FLOAT) -> Path:
    """y = x + x, of n numbers; or another operator's."""
    x, y = (helper.make_tensor_value_info(name, dtype, ["n"]) for name in "xy")
    inputs = ["x", "x"] if operator == "Add" else ["x"]
    graph = helper.make_graph([helper.make_node(operator, inputs, ["y"], name="only")], "toy", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


# ---- ONNX Runtime


def session(path: Path, stream: Any, others: Any = (), **asked: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    cuda = {"user_compute_stream": str(int(stream)), **{name: str(value) for name, value in asked.items()}}
    return onnxruntime.InferenceSession(path, options, providers=[("CUDAExecutionProvider", cuda), *others])


def bound(opened: Any, x: Memory, y: Memory, size: int = SIZE) -> Any:
    binding = opened.io_binding()
    binding.bind_input("x", "cuda", 0, np.float32, (size,), x.address)
    binding.bind_output("y", "cuda", 0, np.float32, (size,), y.address)
    return binding


def late() -> Any:
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(LATE, "1")
    return options


def test_a_run_is_enqueued_on_the_user_s_stream(tmp_path: Path, stream: Any) -> None:
    opened, x, y = session(save(tmp_path / "m.onnx"), stream), Memory(1, 2, 3, 4), Memory()
    opened.run_with_iobinding(bound(opened, x, y), late())
    assert y.now == [0] * SIZE
    call("cuStreamSynchronize", stream)
    assert y.now == [2, 4, 6, 8]
    y.fill()
    opened.run_with_iobinding(bound(opened, x, y))
    assert y.now == [2, 4, 6, 8], "unless it is asked not to, a run waits"


def test_a_graph_holds_what_was_bound_when_it_was_captured(tmp_path: Path, stream: Any) -> None:
    """Which a first run of these shapes, as it allocates, does not let be captured; nor does one that waits."""
    opened = session(save(tmp_path / "m.onnx"), stream)
    x, y = Memory(1, 1, 1, 1), Memory()
    for options, message in (late(), "cuStreamSynchronize"), (None, "cuStreamSynchronize"):
        call("cuStreamBeginCapture", stream, MODE)
        with pytest.raises(RuntimeError, match=message):
            opened.run_with_iobinding(bound(opened, x, y), options)
        assert driver.cuStreamEndCapture(stream)[0], "it is broken"
        opened.run_with_iobinding(bound(opened, x, y))
    call("cuStreamBeginCapture", stream, MODE)
    opened.run_with_iobinding(bound(opened, x, y), late())
    graph = call("cuGraphInstantiate", call("cuStreamEndCapture", stream), 0)
    for number in 5, 6:
        x.fill(*[number] * SIZE)
        call("cuGraphLaunch", graph, stream)
        call("cuStreamSynchronize", stream)
        assert y.now == [2 * number] * SIZE
    call("cuGraphExecDestroy", graph)


@pytest.mark.parametrize(
    ("asked", "others", "operator", "message"),
    [
        ({"cudnn_conv_algo": "x"}, (), "Add", "Unknown provider option"),
        ({"use_tf32": 2}, (), "Add", "use_tf32"),
        ({"user_compute_stream": 8}, (), "Add", "cuStreamGetId"),
        ({}, ("CPUExecutionProvider",), "Add", "explicitly added the CPU EP"),
        ({}, (), "Shape", "assigned to the default CPU EP"),
        ({}, (), "Add", "as in bfloat16"),
    ],
)
def test_sessions_that_are_refused(
    tmp_path: Path, stream: Any, asked: dict[str, Any], others: Any, operator: str, message: str
) -> None:
    dtype = TensorProto.BFLOAT16 if "bfloat16" in message else TensorProto.FLOAT
    with pytest.raises(RuntimeError, match=message):
        session(save(tmp_path / "m.onnx", operator, dtype), stream, others, **asked)
    x = Memory()
    with pytest.raises(RuntimeError, match="not 2048 bytes of the device's memory"):
        bound(session(save(tmp_path / "m.onnx"), stream), x, x, 512)


# ---- TensorRT-RTX


class Words(trt.ILogger):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        if severity <= trt.ILogger.ERROR:
            self.said.append(message)


def compiled(path: Path, log: Words, *profiles: tuple[int, int]) -> Any:
    builder = trt.Builder(log)
    network, config = builder.create_network(2), builder.create_builder_config()
    assert trt.OnnxParser(network, log).parse_from_file(str(path)), log.said
    for least, most in profiles:
        profile = builder.create_optimization_profile()
        profile.set_shape("x", (least,), (most,), (most,))
        config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config)


class Running:
    """A plan of two profiles, 1…4 and 5…8 numbers, and a context of the first."""

    def __init__(self, folder: Path, stream: Any) -> None:
        self.log, self.stream = Words(), int(stream)
        self.engine = trt.Runtime(self.log).deserialize_cuda_engine(
            compiled(save(folder / "m.onnx"), self.log, (1, 4), (5, 8))
        )
        config = self.engine.create_runtime_config()
        self.cache = config.create_runtime_cache()
        config.set_runtime_cache(self.cache)
        self.context = self.engine.create_execution_context(config)
        assert self.context.set_optimization_profile_async(0, self.stream)

    def bind(self, size: int = SIZE) -> tuple[Memory, Memory]:
        x, y = Memory(1, 2, 3, 4), Memory()
        assert self.context.set_input_shape("x", (size,))
        assert self.context.set_tensor_address("x", x.address)
        assert self.context.set_tensor_address("y", y.address)
        return x, y


def test_an_engine_runs_when_its_stream_comes_to_it(tmp_path: Path, stream: Any) -> None:
    running = Running(tmp_path, stream)
    x, y = running.bind()
    assert running.context.execute_async_v3(running.stream)
    assert y.now == [0] * SIZE
    call("cuStreamSynchronize", stream)
    assert y.now == [2, 4, 6, 8]
    x.fill(3, 3, 3, 3)
    call("cuStreamBeginCapture", stream, MODE)
    assert running.context.execute_async_v3(running.stream)
    graph = call("cuGraphInstantiate", call("cuStreamEndCapture", stream), 0)
    for _ in range(2):
        call("cuGraphLaunch", graph, stream)
    call("cuStreamSynchronize", stream)
    assert y.now == [6] * SIZE
    call("cuGraphExecDestroy", graph)


def test_steps_that_are_refused(tmp_path: Path, stream: Any) -> None:
    running = Running(tmp_path, stream)
    context, log, memory = running.context, running.log, Memory()
    for call_it, message in [
        (lambda: context.execute_async_v3(running.stream), "x has no shape"),
        (lambda: context.set_input_shape("x", (5,)), "profile 0 from"),
        (lambda: context.set_input_shape("x", (1, 1)), "profile 0 from"),
        (lambda: context.set_tensor_address("x", memory.address + 4), "not aligned to 256"),
        (lambda: context.set_tensor_address("z", memory.address), "no tensor z"),
        (lambda: context.set_optimization_profile_async(2, running.stream), "no profile 2"),
        (lambda: context.set_input_shape("x", (2,)) and context.execute_async_v3(running.stream), "x has no address"),
    ]:
        log.said.clear()
        assert not call_it()
        assert message in log.said[0]


def test_a_first_run_breaks_a_capture_and_compiles_once(tmp_path: Path, stream: Any) -> None:
    running, before = Running(tmp_path, stream), len(trt.compilations)
    running.bind()
    call("cuStreamBeginCapture", stream, MODE)
    assert not running.context.execute_async_v3(running.stream)
    assert driver.cuStreamEndCapture(stream)[0]
    again = Running(tmp_path, stream)
    for each in (running, running, again):
        each.bind()
        assert each.context.execute_async_v3(each.stream)
        assert len(trt.compilations) == before + 1, "once, and the cache has it"
        assert again.cache.deserialize(bytes(running.cache.serialize()))
    assert not trt.IRuntimeCache.deserialize(running.cache, b'{"by": ["1.2", "90"], "known": []}')
    call("cuStreamSynchronize", stream)


def test_what_does_not_become_an_engine(tmp_path: Path) -> None:
    log = Words()
    assert compiled(save(tmp_path / "m.onnx"), log) is None
    assert compiled(save(tmp_path / "m.onnx"), log, (4, 1)) is None
    network, path = trt.Builder(log).create_network(2), save(tmp_path / "h.onnx", "HardSwish")
    parser = trt.OnnxParser(network, log)
    assert not parser.parse_from_file(str(path))
    assert (parser.num_errors, parser.get_error(0).node_operator()) == (1, "HardSwish")


def test_plans_that_are_refused(tmp_path: Path) -> None:
    log = Words()
    runtime, plan = trt.Runtime(log), bytes(compiled(save(tmp_path / "m.onnx"), log, (1, 4)))
    faults, other = trt.EngineInvalidityDiagnostics, b"1.2.0.54".ljust(len(trt.__version__), b"0")
    for data, fault in [
        (plan, faults(0)),
        (plan[1:], faults.MALFORMED_ENGINE),
        (plan.replace(trt.__version__.encode(), other, 1), faults.VERSION_MISMATCH),
        (plan.replace(b",90,", b",91,", 1), faults.UNSUPPORTED_CC),
    ]:
        assert runtime.get_engine_validity(data[: runtime.engine_header_size])[1] == int(fault)
        assert (runtime.deserialize_cuda_engine(data) is None) == bool(fault)
    assert runtime.deserialize_cuda_engine(plan[:-40]) is None, "cut off"
