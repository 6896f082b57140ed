"""ONNX Runtime's model is bound once to a device's memory, where its steps and prompts read and write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from host_device import HostDevice
from onnx import TensorProto

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.device import Tensor
from specbuild.runtime.backends.onnxruntime_cuda.model import OrtModel, RunContext
from specbuild.runtime.errors import BundleError, ExecutionError

BATCH, BUCKETS, CHUNK, VOCAB, HIDDEN = 2, (1, 4), 6, 11, 3
SPEC = ModelSpec("toy", 1, 2, 4, VOCAB, 12, BUCKETS[-1], hidden=HIDDEN, reads_hidden=True)


# So simple that a test can tell who read what, and when: a node's logits are its token's bit, plus a thousandth of its
# position, plus how many rows it sees times ten. Its hidden state is twice the one that it was given. A step adds 1 to
# all of its slots' keys, and nothing to values.
GRAPH = """
<ir_version: 9, opset_import: ["" : 17]>
toy (
  int32[batch, nodes] input_ids, int32[batch, nodes] position_ids, int32[wanted] logit_nodes, int32[batch] write_rows,
  bool[batch, 1, nodes, 12] "mask.0", float[batch, nodes, 3] hidden_in,
  CACHE[batch, 2, 12, 4] "past_key.0", CACHE[batch, 2, 12, 4] "past_value.0"
) => (
  float[batch, wanted, 11] logits, float[batch, nodes, 3] hidden,
  CACHE[batch, 2, 12, 4] "present_key.0", CACHE[batch, 2, 12, 4] "present_value.0"
)
<float thousandth = {0.001}, float ten = {10}, float two = {2}, float one = {1}, int64[1] last = {-1},
 int64[1] seen_axes = {1}>
{
  bit = Gather(bits, input_ids)
  position = Cast<to = 1>(position_ids)
  small = Mul(position, thousandth)
  column = Unsqueeze(small, last)
  said = Add(bit, column)
  sees = Cast<to = 1>("mask.0")
  count = ReduceSum<keepdims = 1>(sees, last)
  rows = Squeeze(count, seen_axes)
  tens = Mul(rows, ten)
  all = Add(said, tens)
  logits = Gather<axis = 1>(all, logit_nodes)
  hidden = Mul(hidden_in, two)
  key = Cast<to = 1>("past_key.0")
  more = Add(key, one)
  "present_key.0" = Cast<to = KIND>(more)
  "present_value.0" = Identity("past_value.0")
}
"""


def save(path, cache=TensorProto.FLOAT):
    """The graph over caches of a type."""
    name = TensorProto.DataType.Name(cache).lower()
    made = onnx.parser.parse_model(GRAPH.replace("CACHE", name).replace("KIND", str(cache)))
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(VOCAB, dtype=np.float32), "bits"))
    onnx.save(made, path)
    return path


class Toy:
    """The model on a device, and its tensors as arrays."""

    def __init__(self, folder, cache=TensorProto.FLOAT, provider="cpu", device=None):
        self.device = device or HostDevice()
        self.stream = self.device.stream()
        path = save(folder / "toy.onnx", cache)
        context = RunContext(self.device, self.stream, provider, BATCH, BUCKETS, CHUNK)
        self.model: Any = OrtModel(path, SPEC, context)

    def part(self, name, *shape):
        """The beginning of a tensor, as if that were its shape."""
        found = self.model.tensors.masks[0] if name == "mask" else getattr(self.model.tensors, name)
        return self.device.array(Tensor(found.address, shape, found.dtype))

    def fill(self, batch, nodes):
        """Some inputs of a step; the logits that it makes of them."""
        rng, size = np.random.default_rng(batch * nodes), (batch, nodes)
        tokens, positions = rng.integers(0, VOCAB, size), rng.integers(0, 99, size)
        mask = rng.integers(0, 2, (batch, 1, nodes, SPEC.capacity), np.uint8).astype(np.bool_)
        self.part("tokens", *size)[...], self.part("positions", *size)[...] = tokens, positions
        self.part("mask", *mask.shape)[...] = mask
        self.part("hidden_in", *size, HIDDEN)[...] = rng.normal(size=(*size, HIDDEN))
        told = 1e-3 * positions + 10 * mask[:, 0].sum(2)
        return (np.eye(VOCAB)[tokens] + told[..., None]).astype(np.float32)

    def check_hidden(self, batch, nodes):
        given, made = (self.part(name, batch, nodes, HIDDEN) for name in ("hidden_in", "hidden"))
        assert given.any()
        np.testing.assert_array_equal(made, 2 * given)


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path)


@pytest.mark.parametrize(
    ("kind", "held", "one"),
    [("FLOAT16", np.float16, 1.0), ("BFLOAT16", np.uint16, 0x3F80), ("FLOAT", np.float32, 1.0)],
)
def test_a_step_is_of_all_slots_and_has_all_nodes_logits(tmp_path, kind, held, one):
    """Tensors hold a smaller step at their beginning, and the cache, of the graph's type, is updated in place."""
    toy = Toy(tmp_path, TensorProto.DataType.Value(kind))
    cache = toy.device.array(toy.model.tensors.cache)
    assert cache.dtype == held
    for nodes in (1, 4):
        cache[0] = 0
        expected = toy.fill(BATCH, nodes)
        toy.model.enqueue(nodes, toy.stream)
        np.testing.assert_allclose(toy.part("logits", BATCH, nodes, VOCAB), expected, atol=1e-5)
        toy.check_hidden(BATCH, nodes)
        assert (cache[0] == one).all()
        assert not cache[1].any(), "values are as they were"


def test_a_step_that_fails_says_so_in_one_line(toy):
    toy.fill(BATCH, 4)
    toy.part("tokens", BATCH, 4)[:] = 99
    with pytest.raises(ExecutionError, match=r"^ONNX Runtime failed in a step: .*99"):
        toy.model.enqueue(4, toy.stream)


class Provider:
    """ONNX Runtime's CUDA provider by its CPU's: what sessions and runs are asked, and when a run fails."""

    def __init__(self, monkeypatch, device, refuses=None):
        """`device`: where runs are enqueued; `refuses`: the number of the run that fails; None: none."""
        self.sessions: list[dict[str, Any]] = []
        self.runs: list[bool] = []  # whether the host waits for the run
        outer, real = self, onnxruntime.InferenceSession

        class Session:
            def __init__(self, graph, options, providers):
                ((name, asked),) = providers
                assert name == "CUDAExecutionProvider"
                fallback = options.get_session_config_entry("session.disable_cpu_ep_fallback")
                outer.sessions.append({**asked, "only here": fallback})
                self.stream = int(asked["user_compute_stream"])
                self.inner = real(graph, providers=["CPUExecutionProvider"])

            def __getattr__(self, name):
                return getattr(self.inner, name)

            def get_providers(self):
                return ["CUDAExecutionProvider"]

            def io_binding(self):
                inner = self.inner.io_binding()
                bind_input, bind_output = inner.bind_input, inner.bind_output
                inner.bind_input = lambda name, _, *rest: bind_input(name, "cpu", *rest)
                inner.bind_output = lambda name, _, *rest: bind_output(name, "cpu", *rest)
                return inner

            def run_with_iobinding(self, binding, options):
                outer.runs.append(options.get_run_config_entry("disable_synchronize_execution_providers") != "1")
                if len(outer.runs) == refuses:
                    raise RuntimeError("no run of this\nmodel")
                device.run(self.stream, lambda: self.inner.run_with_iobinding(binding))

        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
        monkeypatch.setattr(onnxruntime, "InferenceSession", Session)


WARM = 2 * len(BUCKETS)  # runs before steps are captured


def test_on_a_gpu_nothing_is_rounded_or_left_to_the_cpu_and_steps_are_replayed(tmp_path, monkeypatch):
    """A graph for each bucket, captured before anything is decoded; a larger graph holds the run."""
    device = HostDevice()
    provider, toy = Provider(monkeypatch, device), Toy(tmp_path, provider="cuda", device=device)
    stream = {"user_compute_stream": str(toy.stream), "use_tf32": "0"}
    assert provider.sessions == [stream | {"only here": "1"}]
    assert provider.runs == [False] * (WARM + len(BUCKETS)), "one allocates, one is steady, one is captured"
    assert device.captured == len(BUCKETS)
    assert toy.model.capturable
    assert not device.array(toy.model.tensors.cache).any(), "its first runs leave nothing"
    provider.runs.clear()
    expected = toy.fill(BATCH, 4)
    toy.model.enqueue(4, toy.stream)
    device.wait(toy.stream)
    np.testing.assert_allclose(toy.part("logits", BATCH, 4, VOCAB), expected, atol=1e-5)
    assert provider.runs == [], "it was replayed"
    whole = device.graph(lambda: toy.model.enqueue(4, toy.stream), toy.stream)
    assert provider.runs == [False], "a graph within a graph is the run itself"
    whole()
    toy.model.prefill(1, 3, 2, toy.stream)
    device.wait(toy.stream)
    assert provider.runs == [False] * 2
    assert (device.array(toy.model.tensors.cache)[0, 1] == 3).all()
    assert device.uncaptured == []


def test_a_prompts_steps_become_graphs_by_slot(tmp_path, monkeypatch):
    """From the third of a length on; whichever node's logits are wanted. A chunk may be longer than any step."""
    device = HostDevice()
    provider, toy = Provider(monkeypatch, device), Toy(tmp_path, provider="cuda", device=device)
    captured, ran = device.captured, []
    for turn in range(6):
        provider.runs.clear()
        slot, last = turn % 2, turn % 3
        expected = toy.fill(1, CHUNK)
        toy.model.prefill(slot, CHUNK, last, toy.stream)
        device.wait(toy.stream)
        np.testing.assert_allclose(toy.part("logits", VOCAB), expected[0, last], atol=1e-5)
        toy.check_hidden(1, CHUNK)
        assert (device.array(toy.model.tensors.cache)[0, slot] == turn // 2 + 1).all()
        ran.append((len(provider.runs), device.captured - captured))
    assert ran == [(1, 0), (1, 0), (1, 1), (1, 2), (0, 2), (0, 2)]
    for nodes in (1, 2):  # a second and a third length
        toy.fill(1, nodes)
        toy.model.prefill(0, nodes, 0, toy.stream)
    device.wait(toy.stream)
    assert (device.captured, device.uncaptured) == (captured + 2, [])
    toy.model.close()


@pytest.mark.parametrize("refuses", [1, WARM + 1])
def test_where_a_step_cannot_be_captured_steps_are_enqueued(tmp_path, monkeypatch, refuses):
    """Whether the first run fails or the one that is captured; on a stream that nothing has spoilt."""
    device = HostDevice()
    monkeypatch.setattr(device, "graph", fallible(device))
    provider, toy = Provider(monkeypatch, device, refuses), Toy(tmp_path, provider="cuda", device=device)
    assert len(provider.sessions) == 2
    assert toy.model.stream != toy.stream
    assert provider.sessions[1]["user_compute_stream"] == str(toy.model.stream)
    assert not toy.model.capturable
    (line,) = device.uncaptured
    assert line == "no graph holds ONNX Runtime's steps: ONNX Runtime failed in a step: no run of this model"
    expected = toy.fill(BATCH, 4)
    toy.model.enqueue(4, toy.model.stream)
    device.wait(toy.model.stream)
    np.testing.assert_allclose(toy.part("logits", BATCH, 4, VOCAB), expected, atol=1e-5)
    assert (device.array(toy.model.tensors.cache)[0] == 1).all(), "its first runs leave nothing"


def fallible(device):
    """`HostDevice.graph`, as a GPU says that something is not captured."""
    graph = device.graph

    def capture(enqueue, stream):
        try:
            return graph(enqueue, stream)
        except ExecutionError as error:
            device.uncaptured.append(str(error))
            return enqueue

    return capture


def test_onnx_runtime_without_cuda_says_what_to_install():
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    device = HostDevice()
    with pytest.raises(BundleError, match="pip install onnxruntime-gpu"):
        OrtModel(Path("model.onnx"), SPEC, RunContext(device, device.stream(), "cuda", 1, BUCKETS, CHUNK))


def test_a_session_that_falls_back_to_the_cpu_is_refused(tmp_path, monkeypatch):
    device = HostDevice()
    Provider(monkeypatch, device)
    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda _: ["CPUExecutionProvider"])
    with pytest.raises(BundleError, match="found no GPU it can use: pip install onnxruntime-gpu"):
        Toy(tmp_path, provider="cuda", device=device)


def test_onnx_runtime_has_one_stream_and_names_a_bad_graph(toy, tmp_path):
    device = HostDevice()
    with pytest.raises(ExecutionError, match=r"^the toy runs on stream 1, not on 2: use that$"):
        toy.model.enqueue(1, toy.stream + 1)
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleError, match=r"model\.onnx does not load in ONNX Runtime"):
        OrtModel(tmp_path / "model.onnx", SPEC, RunContext(device, device.stream(), "cpu", 1, BUCKETS, CHUNK))
