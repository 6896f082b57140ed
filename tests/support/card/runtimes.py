"""What runs models on the stand-in card keeps to the rules of what it stands for; run by tests/test_card_bundles.py."""

import numpy as np
import onnx
import onnxruntime
import pytest
from cuda.bindings import driver
from device import call, take_gpu
from onnx import TensorProto, helper

MODE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
SIZE, LATE = 4, "disable_synchronize_execution_providers"


@pytest.fixture(autouse=True)
def _gpu():
    take_gpu()


@pytest.fixture
def stream():
    made = call("cuStreamCreate", 1)
    yield made
    call("cuStreamDestroy", made)


class Memory:
    """Floats on the device, in room for more."""

    def __init__(self, *numbers):
        self.address = int(call("cuMemAlloc", 1024))
        self.fill(*numbers)

    def fill(self, *numbers):
        host = np.zeros(16, np.float32)
        host[: len(numbers)] = numbers
        call("cuMemcpyHtoD", self.address, host.ctypes.data, host.nbytes)

    @property
    def now(self):
        """At once, whatever is enqueued."""
        host = np.zeros(SIZE, np.float32)
        call("cuMemcpyDtoH", host.ctypes.data, self.address, host.nbytes)
        return host.tolist()


def save(path, operator="Add", dtype=TensorProto.FLOAT):
    """y = x + x, of n numbers; or another operator's."""
    x, y = (helper.make_tensor_value_info(name, dtype, ["n"]) for name in "xy")
    inputs = ["x", "x"] if operator == "Add" else ["x"]
    graph = helper.make_graph([helper.make_node(operator, inputs, ["y"], name="only")], "toy", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


# ---- ONNX Runtime


def session(path, stream, others=(), **asked):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    cuda = {"user_compute_stream": str(int(stream)), **{name: str(value) for name, value in asked.items()}}
    return onnxruntime.InferenceSession(path, options, providers=[("CUDAExecutionProvider", cuda), *others])


def bound(opened, x, y, size=SIZE):
    binding = opened.io_binding()
    binding.bind_input("x", "cuda", 0, np.float32, (size,), x.address)
    binding.bind_output("y", "cuda", 0, np.float32, (size,), y.address)
    return binding


def late():
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(LATE, "1")
    return options


def test_a_run_is_enqueued_on_the_user_s_stream(tmp_path, stream):
    opened, x, y = session(save(tmp_path / "m.onnx"), stream), Memory(1, 2, 3, 4), Memory()
    opened.run_with_iobinding(bound(opened, x, y), late())
    assert y.now == [0] * SIZE
    call("cuStreamSynchronize", stream)
    assert y.now == [2, 4, 6, 8]
    y.fill()
    opened.run_with_iobinding(bound(opened, x, y))
    assert y.now == [2, 4, 6, 8], "unless it is asked not to, a run waits"


def test_a_graph_holds_what_was_bound_when_it_was_captured(tmp_path, stream):
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
def test_sessions_that_are_refused(tmp_path, stream, asked, others, operator, message):
    dtype = TensorProto.BFLOAT16 if "bfloat16" in message else TensorProto.FLOAT
    with pytest.raises(RuntimeError, match=message):
        session(save(tmp_path / "m.onnx", operator, dtype), stream, others, **asked)
    x = Memory()
    with pytest.raises(RuntimeError, match="not 2048 bytes of the device's memory"):
        bound(session(save(tmp_path / "m.onnx"), stream), x, x, 512)
