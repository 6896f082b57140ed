"""A toy of one layer: TensorRT's own parser sees the tensors that are bound; a GPU computes what ONNX Runtime does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from device import gpus, take_gpu
from host_device import HostDevice
from numpy.typing import NDArray

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.cuda import Cuda
from specbuild.runtime.backends.gpu.device import PageTable, Tensor
from specbuild.runtime.backends.gpu.pages import Pages
from specbuild.runtime.backends.gpu.plan import Plan, logger
from specbuild.runtime.backends.gpu.tensorrt import TrtModel
from specbuild.runtime.backends.gpu.tensors import TensorInfo, check_tensors, expected_tensors
from specbuild.runtime.bundle.backend import BACKENDS
from specbuild.runtime.bundle.manifest import EngineRecord
from specbuild.runtime.errors import BundleError, ExecutionError

BACKEND = "tensorrt-rtx"
HEADS, CAPACITY, HEAD_DIM, VOCAB, BATCH, BUCKETS, CHUNK = 2, 32, 16, 64, 2, [1, 4], 8
SPEC = ModelSpec("toy", 1, HEADS, HEAD_DIM, VOCAB, CAPACITY, CHUNK)
Inputs = dict[str, NDArray[Any]]


GRAPH = """
<ir_version: 11, opset_import: ["" : 24]>
toy (
  int32[batch, nodes] input_ids, int32[batch, nodes] position_ids, int32[logit_nodes] logit_nodes,
  int32[batch] write_rows, bool[batch, 1, nodes, 32] "mask.0",
  float[batch, 2, 32, 16] "past_key.0", float[batch, 2, 32, 16] "past_value.0"
) => (
  float[batch, logit_nodes, 64] logits,
  float[batch, 2, 32, 16] "present_key.0", float[batch, 2, 32, 16] "present_value.0"
)
<int64[4] split = {0, 0, 2, 16}, int64[3] join = {0, 0, 32}>
{
  embedded = Gather(table, input_ids)
  placed = Gather(places, position_ids)
  x = Add(embedded, placed)
  rows = Cast<to = 7>(write_rows)
  q_flat = MatMul(x, q)
  q_heads = Reshape(q_flat, split)
  q_new = Transpose<perm = [0, 2, 1, 3]>(q_heads)
  k_flat = MatMul(x, k)
  k_heads = Reshape(k_flat, split)
  k_new = Transpose<perm = [0, 2, 1, 3]>(k_heads)
  v_flat = MatMul(x, v)
  v_heads = Reshape(v_flat, split)
  v_new = Transpose<perm = [0, 2, 1, 3]>(v_heads)
  "present_key.0" = TensorScatter<axis = 2, mode = "linear">("past_key.0", k_new, rows)
  "present_value.0" = TensorScatter<axis = 2, mode = "linear">("past_value.0", v_new, rows)
  y = Attention<scale = 0.25>(q_new, "present_key.0", "present_value.0", "mask.0")
  y_turned = Transpose<perm = [0, 2, 1, 3]>(y)
  y_flat = Reshape(y_turned, join)
  picked = Gather<axis = 1>(y_flat, logit_nodes)
  logits = MatMul(picked, head)
}
"""


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embedding, one attention over the cache, and a head, in float32, with the inputs of the standard lowering."""
    width, rng = HEADS * HEAD_DIM, np.random.default_rng(0)
    shapes = {"table": (VOCAB, width), "places": (CAPACITY, width), "head": (width, VOCAB)}
    shapes |= dict.fromkeys("qkv", (width, width))
    made = onnx.parser.parse_model(GRAPH)
    for name, shape in shapes.items():
        weight = rng.normal(size=shape).astype(np.float32) / (4 if name in "qkv" else 1)
        made.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    path = tmp_path_factory.mktemp("toy") / "toy.onnx"
    onnx.save(made, path)
    return path


@pytest.fixture(scope="module")
def reference(graph: Path) -> Callable[[Inputs], list[NDArray[Any]]]:
    """`reference(inputs)`: logits and both caches, by ONNX Runtime on the CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return lambda inputs: list(session.run(["logits", "present_key.0", "present_value.0"], inputs))


def inputs(batch: int, nodes: int, start: int, past: NDArray[Any], seed: int) -> Inputs:
    """A chain of nodes from a row on, over caches `[2, batch, heads, capacity, D]`; all nodes' logits."""
    rng = np.random.default_rng(seed)
    return {
        "input_ids": rng.integers(0, VOCAB, (batch, nodes), dtype=np.int32),
        "position_ids": np.tile(np.arange(start, start + nodes, dtype=np.int32), (batch, 1)),
        "logit_nodes": np.arange(nodes, dtype=np.int32),
        "write_rows": np.full(batch, start, dtype=np.int32),
        "mask.0": np.tile(np.tri(nodes, CAPACITY, start, dtype=np.bool_), (batch, 1, 1, 1)),
        "past_key.0": past[0],
        "past_value.0": past[1],
    }


def test_tensorrt_s_parser_sees_the_tensors_that_are_bound(graph: Path) -> None:
    module = pytest.importorskip("tensorrt_rtx")
    builder = module.Builder(logger(module))
    network = builder.create_network(1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    assert module.OnnxParser(network, logger(module)).parse_from_file(str(graph))
    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    tensors += [network.get_output(i) for i in range(network.num_outputs)]
    found = {tensor.name: TensorInfo(tensor.dtype.name, tuple(tensor.shape)) for tensor in tensors}
    for name, info in expected_tensors(SPEC, "FLOAT").items():  # which is no part of a network, but of an engine
        found[name] = replace(found[name], alias=info.alias)
    assert check_tensors(SPEC, found) == "FLOAT"


class Bound:
    """A context that notes what it is given; TensorRT wants addresses that are multiples of 256."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.ran: list[tuple[int, ...]] = []

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % 256 == 0, name
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        self.ran.append(self.shapes["input_ids"])
        return True


class NoGpu(HostDevice):
    """A host's memory at addresses such as CUDA gives."""

    current = contextlib.nullcontext()

    def pinned(self, shape: Any, dtype: Any) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = super().pinned((size + 256,), np.uint8)
        return memory[-memory.ctypes.data % 256 :][:size].view(dtype).reshape(shape)


class NoPlan:
    """A plan over paged caches of which only the record and the tensors are there."""

    scratch_bytes = 256

    def __init__(self, rows: int, capacity: int = 96) -> None:
        self.spec = ModelSpec("toy", 1, HEADS, 64, VOCAB, capacity, CHUNK)
        sizes = {"nodes4": (4, 4, 4), "prompt": (5, 8, 8)}
        tree = {"nodes4": [4, 64, 64], "prompt": [0, 0, 0]}
        each = {"batch": [1, 1, 3], "pages": [1, 19, 19]}
        profiles = {n: {**each, "nodes": list(s), "tree": tree[n]} for n, s in sizes.items()}
        self.record = EngineRecord("10.15", ["89"], "plugin", "1", False, None, 0, profiles, "auto", rows)
        self.tensors = expected_tensors(self.spec, "HALF", "plugin", rows)
        self.profiles = [{n: tuple(s) for n, s in p.items()} for p in profiles.values()]
        self.contexts: list[Bound] = []

    def context(self, *_: Any, **__: Any) -> Bound:
        self.contexts.append(Bound())
        return self.contexts[-1]

    def call(self, method: Callable[..., bool], *arguments: Any) -> None:
        assert method(*arguments)

    def keep_compiled(self) -> None:
        self.kept = [list(context.ran) for context in self.contexts]


def test_what_it_may_be_asked_has_run_when_what_was_compiled_is_kept() -> None:
    """Each bucket of all slots, and of one slot the few lengths that a prompt's chunk is padded to; no others."""
    device, plan = NoGpu(), NoPlan(16)
    model: Any = TrtModel(plan, plan.spec, device, 3, pages=PageTable(device, Pages(3, 96, 16, 11)))  # type: ignore[arg-type]
    assert model.lengths == (4, 6, 8)
    assert plan.kept == [[(3, 4)], [(1, 4)], [(1, 6), (1, 8)]]
    with pytest.raises(ExecutionError, match="a step of one slot has 4, 6, 8 nodes, not 5"):
        model.prefill(0, 5, 4, 1)


@pytest.mark.parametrize("says", [None, True, False])
def test_whether_a_graph_may_hold_a_step_is_the_engines_word(
    monkeypatch: pytest.MonkeyPatch, says: bool | None
) -> None:
    """TensorRT-RTX has such a word, TensorRT has none."""
    device, plan, asked = NoGpu(), NoPlan(16), list[int]()
    if says is not None:
        told = lambda self, stream: asked.append(stream) or says  # noqa: E731
        monkeypatch.setattr(Bound, "is_stream_capturable", told, raising=False)
    model: Any = TrtModel(plan, plan.spec, device, 3, pages=PageTable(device, Pages(3, 96, 16, 11)))  # type: ignore[arg-type]
    assert model.capturable == (says is not False)
    assert len(asked) == (says is not None)


def test_pages_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the table for a step of all slots, a slot's own row for its prompts; all pages, wherever a slot's lie."""
    device, plan = NoGpu(), NoPlan(16)
    table = PageTable(device, Pages(3, 96, 16, 11))
    model: Any = TrtModel(plan, plan.spec, device, 3, pages=table)  # type: ignore[arg-type]
    assert model.cache.shape == (2, 12, HEADS, 16, 64)
    model.pages.pages.take(2, 2, 0, 40)
    table.update(device.stream())
    model.prefill(2, 8, 7, 1)
    *_, prompts = plan.contexts
    steps = plan.contexts[0]
    page = 12 * HEADS * 16 * 64 * 2
    for context, batch in ((steps, 3), (prompts, 1)):
        assert context.shapes["past_key.0"] == context.shapes["past_value.0"] == (12, HEADS, 16, 64)
        assert context.shapes["page_table"] == (batch, 6)
        assert context.addresses["past_key.0"] == context.addresses["present_key.0"] == model.cache.address
        assert context.addresses["past_value.0"] == model.cache.address + page
        found = device.array(Tensor(context.addresses["page_table"], (batch, 6), np.dtype(np.int32)))
        np.testing.assert_array_equal(found, table.pages.table[3 - batch :])
    assert found[0, :3].all()
    for other in (None, PageTable(device, Pages(3, 96, 32, 11)), PageTable(device, Pages(3, 112, 16, 11))):
        with pytest.raises(BundleError, match="the toy's pages are not those of the other model: build the bundle"):
            TrtModel(plan, plan.spec, device, 3, pages=other)  # type: ignore[arg-type]


class OnGpu:
    """A toy plan, compiled here for any GPU, and what is copied to it and back."""

    def __init__(self, graph: Path) -> None:
        from specbuild.builder.codegen.tensorrt import compile_engine, make_profiles

        profiles = make_profiles(BUCKETS, BATCH, CHUNK)
        engine = compile_engine(graph, BACKEND, profiles)
        path = graph.with_suffix(".plan")
        path.write_bytes(engine.plan)
        self.cuda = Cuda()
        record = EngineRecord(
            version=engine.version,
            architectures=[],
            attention="native",
            plugin=None,
            version_compatible=False,
            hardware_compatible=None,
            activations=0,
            profiles={p.name: {name: list(sizes) for name, sizes in p.sizes.items()} for p in profiles},
        )
        self.plan = Plan(path, BACKENDS[BACKEND], record, self.cuda)
        scratch = self.cuda.empty((self.plan.scratch_bytes,), np.uint8)
        self.model = TrtModel(self.plan, SPEC, self.cuda, BATCH, scratch)
        self.stream = self.cuda.stream()

    def put(self, given: Inputs) -> None:
        model = self.model
        for to, name in (
            (model.tokens, "input_ids"),
            (model.positions, "position_ids"),
            (model.rows, "write_rows"),
            (model.masks[0], "mask.0"),
        ):
            staged = self.cuda.pinned(given[name].shape, given[name].dtype)
            staged[...] = given[name]
            self.cuda.upload(to, staged, self.stream)

    def get(self, tensor: Tensor, *shape: int) -> NDArray[Any]:
        array = self.cuda.pinned(shape or tensor.shape, tensor.dtype)
        self.cuda.download(array, tensor, self.stream)
        self.cuda.wait(self.stream)
        return array.copy()


@pytest.mark.gpu
@pytest.mark.skipif(not gpus(), reason="needs an NVIDIA GPU and its driver")
def test_a_toy_on_a_gpu(graph: Path, reference: Callable[[Inputs], list[NDArray[Any]]]) -> None:
    """Prompts of one slot, short and long, then steps of all slots, alone and from a graph."""
    pytest.importorskip("tensorrt_rtx")
    if take_gpu() not in BACKENDS[BACKEND].architectures:  # TensorRT-RTX is for some GPUs alone
        with pytest.raises(BundleError, match=r"the plan was compiled for .*: build the bundle for it"):
            OnGpu(graph)
        return
    gpu = OnGpu(graph)
    try:
        check_toy(gpu, reference)
    finally:
        gpu.model.close()
        gpu.cuda.close()


def check_toy(gpu: OnGpu, reference: Callable[[Inputs], list[NDArray[Any]]]) -> None:
    model, cache = gpu.model, np.zeros((2, BATCH, HEADS, CAPACITY, HEAD_DIM), dtype=np.float32)
    assert (model.buckets, model.chunk) == (tuple(BUCKETS), CHUNK)
    assert gpu.plan.inspect()
    assert not gpu.get(model.cache).any()
    for slot, nodes in ((1, 3), (0, 7), (0, 4)):
        size = min(length for length in model.lengths if length >= nodes)
        given = inputs(1, size, 0, cache[:, slot : slot + 1], nodes)
        gpu.put(given)
        model.prefill(slot, size, nodes - 1, gpu.stream)
        logits, *present = reference(given)
        cache[:, slot] = np.stack(present)[:, 0]
        np.testing.assert_allclose(gpu.get(model.logits, VOCAB), logits[0, nodes - 1], rtol=1e-3, atol=1e-3)
        found = gpu.get(model.cache)[:, slot, :, :size]
        np.testing.assert_allclose(found, cache[:, slot, :, :size], rtol=1e-3, atol=1e-3)
    assert np.isfinite(gpu.get(model.cache)).all()
    for nodes, start in ((4, 3), (1, 7)):
        step = gpu.cuda.graph(lambda nodes=nodes: model.enqueue(nodes, gpu.stream), gpu.stream)
        assert gpu.cuda.uncaptured == []
        given = inputs(BATCH, nodes, start, cache, nodes)
        gpu.put(given)
        logits, *present = reference(given)
        for run in (lambda nodes=nodes: model.enqueue(nodes, gpu.stream), step):  # a step repeated changes nothing
            run()
            found = gpu.get(model.logits, BATCH, nodes, VOCAB)
            np.testing.assert_allclose(found, logits, rtol=1e-3, atol=1e-3)
        cache = np.stack(present)
