"""What a graph takes from files is known before ONNX Runtime sees it."""

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from specbuild.runtime.backends.onnx_graph import external_tensors, open_session
from specbuild.runtime.errors import BundleError

WEIGHTS = np.arange(6, dtype=np.float32).reshape(2, 3)


def outside(name="w", location="w.bin", offset=0, length=24):
    tensor = TensorProto(name=name, data_type=1, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": str(offset), "length": str(length)}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def model(tensor, *nodes):
    made = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float[2, 3] x) => (float[2, 3] y) { y = Add(x, w) }'
    )
    made.graph.initializer.append(tensor)
    made.graph.node.extend(nodes)
    return bytes(made.SerializeToString())


def session_of(folder, data, provider="CPUExecutionProvider"):
    (folder / "m.onnx").write_bytes(data)
    return open_session(folder / "m.onnx", onnxruntime.SessionOptions(), [provider])


@pytest.mark.parametrize("offset", [None, 0, 3, 64])
def test_weights_are_those_of_the_file_or_of_the_graph(tmp_path, offset):
    (tmp_path / "w.bin").write_bytes(bytes(offset or 0) + WEIGHTS.tobytes())
    data = model(numpy_helper.from_array(WEIGHTS, "w") if offset is None else outside(offset=offset))
    assert (external_tensors(data) == []) == (offset is None)
    for provider in ("CPUExecutionProvider", ("CPUExecutionProvider", {})):  # the other's weights are copied
        (found,) = session_of(tmp_path, data, provider).run(None, {"x": np.ones((2, 3), np.float32)})
        assert (found == WEIGHTS + 1).all()


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1},
        {"offset": -1},
        {"length": 20},
        {"length": -24},
        {"offset": 2**70},
        {"location": "gone"},
        {"location": "sub/w.bin"},
    ],
)
def test_what_is_not_in_the_file_is_refused(tmp_path, change):
    (tmp_path / "sub").mkdir()
    for name in ("w.bin", "sub/w.bin"):
        (tmp_path / name).write_bytes(WEIGHTS.tobytes())
    with pytest.raises(BundleError):
        session_of(tmp_path, model(outside(**change)))


def test_files_of_anything_but_initializers_are_refused():
    constant = helper.make_node("Constant", [], ["c"], value=outside("c"))
    inner = helper.make_graph([], "inner", [], [], [outside("deep")])
    nested = helper.make_node("If", ["x"], ["z"], then_branch=inner, else_branch=inner)
    cached = helper.make_node("EPContext", [], ["z"], domain="com.microsoft")
    for node, what in ((constant, "tensor 'c'"), (nested, "tensor 'deep'"), (cached, "EPContext")):
        with pytest.raises(ValueError, match=what):
            external_tensors(model(numpy_helper.from_array(WEIGHTS, "w"), node))


def test_sizes_may_be_packed():
    data = model(outside())
    packed = data.replace(b"\x08\x02\x08\x03", b"\x0a\x02\x02\x03")
    assert packed != data
    assert external_tensors(packed) == external_tensors(data)


def test_damaged_bytes_are_a_value_error_or_a_model():
    data, rng = model(outside()), np.random.default_rng(0)
    for _ in range(2000):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] = rng.integers(256)
        try:
            external_tensors(bytes(damaged[: rng.integers(len(data) + 1)]))
        except ValueError:
            continue


@pytest.mark.parametrize("name", [b"result", b"columns"])
def test_a_name_that_is_no_text_is_refused(tmp_path, name):
    """Of a tensor or of a dimension. Found by `make attack`, seed 3432447406, graphs:659."""
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float[columns] x) => (float[columns] result) { result = Relu(x) }'
    )
    data = onnx.parser.parse_model(text).SerializeToString()
    assert name in data
    path = tmp_path / "model.onnx"
    path.write_bytes(data.replace(name, b"\xe5" + name[1:]))
    with pytest.raises(BundleError, match=r"does not load in ONNX Runtime .*can't decode byte 0xe5"):
        open_session(path, onnxruntime.SessionOptions(), ["CPUExecutionProvider"])
