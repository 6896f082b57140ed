"""A model of ONNX Runtime over the standard lowering: on a GPU by its CUDA provider, in tests on a CPU.

There is one session. Every tensor is bound by address, once per bucket, and the cache is updated in place. On a GPU
each bucket's step is captured as a graph and replayed; a graph of a whole round holds the steps themselves. That takes
a provider whose later runs neither allocate nor wait, so the first runs come before. A slot's prefill steps are such
graphs too, once there were some of their length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnxruntime

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.device import Device, Pages, Step, Tensor
from specbuild.runtime.backends.gpu.step_tensors import StepTensors, Tensors
from specbuild.runtime.backends.gpu.tensors import CACHES, TensorInfo, check_tensors
from specbuild.runtime.backends.onnx_graph import GraphFile, open_session
from specbuild.runtime.errors import BundleError, ExecutionError, SpecbuildError, one_line

from .prefill_graphs import RUNS, PrefillGraphs

Provider = Literal["cuda", "cpu"]
_ERRORS = 3  # ONNX Runtime's log severity
_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16
_TYPES = {"float": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32", "bool": "BOOL"}


class RunContext(NamedTuple):
    """Where a model runs, and the sizes of its steps.

    Attributes:
        device: The device of `provider`.
        stream: The stream to run on.
        provider: ONNX Runtime's execution provider.
        batch_size: The number of slots.
        buckets: The node counts of steps of all slots, ascending.
        chunk: Maximum number of nodes in a prefill step.
    """

    device: Device
    stream: int
    provider: Provider
    batch_size: int
    buckets: Sequence[int]
    chunk: int


class OrtModel:
    """See `Model`; it runs on `stream`: the one it was made with or, if a capture failed on that, a new one."""

    pages: Pages | None = None
    _tree_nodes = 0  # of TreeAttention, which only parts have

    def __init__(self, graph: Path | GraphFile, spec: ModelSpec, context: RunContext) -> None:
        """Load the graph, allocate the tensors, and run every bucket's step.

        Args:
            graph: The graph, or the path of one that this program wrote itself.
            spec: The model.
            context: Where the model runs, and the sizes of its steps.

        Raises:
            BundleError: If the graph does not load, or ONNX Runtime has no such provider.
            ExecutionError: If the device's memory is too small, or a step fails.
        """
        device, self.stream, provider, batch_size, buckets, chunk = context
        self.spec, self.batch_size, self.chunk = spec, batch_size, chunk
        self.buckets: Sequence[int] = tuple(buckets)
        self._graph, self._provider, self._device = graph, provider, device
        memory, largest = self._open(), self.buckets[-1]
        cache = device.empty((2 * spec.layers, batch_size, spec.kv_heads, spec.capacity, spec.head_dim), memory)
        self.tensors = StepTensors.allocate(device, spec, (batch_size, largest, chunk), cache, self._tree_nodes)
        self._allocate()
        self._numbers = device.empty((max(largest, chunk),), np.int32)  # 0, 1, 2, …: nodes with logits
        numbers = device.pinned(self._numbers.shape, np.int32)
        numbers[:] = np.arange(len(numbers))
        device.upload(self._numbers, numbers, self.stream)
        device.wait(self.stream)
        self._graphs, self._prefills = dict[int, Step](), PrefillGraphs(device)
        try:
            self._prepare(captures=provider == "cuda")
        except SpecbuildError as error:
            if provider != "cuda":
                raise
            device.uncaptured.append(f"no graph holds ONNX Runtime's steps: {one_line(error)}")
            self._graphs, self.stream = {}, device.stream()  # a failed capture may have spoilt the other
            self._open()
            self._prepare(captures=False)

    @property
    def capturable(self) -> bool:
        """See `Model.capturable`; then steps are replayed from graphs too."""
        return bool(self._graphs)

    @property
    def lengths(self) -> Sequence[int]:
        """See `Model.lengths`."""
        return range(1, self.chunk + 1)

    def _open(self) -> np.dtype[Any]:
        """Open the graph on the stream; return the dtype of the caches' memory."""
        self._session = open_on(self._graph, self._provider, self.stream)
        return np.dtype(CACHES[check_tensors(self.spec, _tensors(self._session))])

    def _allocate(self) -> None:
        """Allocate what steps need besides their tensors: nothing."""

    def _prepare(self, captures: bool) -> None:
        """Bind every step, run it twice and capture it. All nodes see all rows, so that none gives NaN."""
        batch, numbers = self.batch_size, self._numbers
        self._steps = {nodes: self._bind(batch, nodes, 0, numbers.view(nodes)) for nodes in self.buckets}
        for mask in self.tensors.masks.values():
            self._device.fill(mask, 1, self.stream)
        self._device.wait(self.stream)
        for nodes in (*self.buckets,) * RUNS:
            self._run(self._steps[nodes])
        self._device.wait(self.stream)
        if captures:
            self._graphs = {nodes: self._capture(nodes) for nodes in self.buckets}
            self.enqueue(self.buckets[0], self.stream)
        for tensor in (*self.tensors.masks.values(), self.tensors.cache):
            self._device.fill(tensor, 0, self.stream)
        self._device.wait(self.stream)

    def _capture(self, nodes: int) -> Step:
        """Return what launches a graph of a step; raise ExecutionError if it cannot be captured."""
        step = partial(self._run, self._steps[nodes])
        graph = self._device.graph(step, self.stream)
        if graph is step:
            raise ExecutionError(self._device.uncaptured.pop())
        return graph

    def enqueue(self, nodes: int, stream: int) -> None:
        """See `Model.enqueue`; raises ExecutionError if ONNX Runtime fails."""
        self._check(stream)
        replays = self.capturable and not self._device.capturing
        self._graphs[nodes]() if replays else self._run(self._steps[nodes])

    def prefill(self, slot: int, nodes: int, last: int, stream: int) -> None:
        """See `Model.prefill`; raises ExecutionError if ONNX Runtime fails."""
        self._check(stream)
        node = self._numbers.view(1, offset=4 * last)
        if not self.capturable:
            return self._run(self._bind(1, nodes, slot, node))
        first = self._prefills.last
        self._device.copy(first, node, stream)
        self._prefills.step(slot, nodes, lambda: partial(self._run, self._bind(1, nodes, slot, first)), stream)()

    def _check(self, stream: int) -> None:
        if stream != self.stream:
            raise ExecutionError(f"the {self.spec.name} runs on stream {self.stream}, not on {stream}: use that")

    def _run(self, steps: Sequence[Step]) -> None:
        try:
            for step in steps:
                step()
        except SpecbuildError:
            raise
        except Exception as error:  # ONNX Runtime raises many unrelated types
            raise ExecutionError(f"ONNX Runtime failed in a step: {one_line(error)}") from error

    def _bound(self, session: Any, inputs: Tensors, outputs: Tensors) -> Step:
        """Return what runs a session on tensors where they lie."""
        binding = session.io_binding()
        for bind, several in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, tensor in several.items():
                kind = _BFLOAT16 if tensor.dtype == np.uint16 else tensor.dtype.type
                bind(name, self._provider, 0, kind, tensor.shape, tensor.address)
        return lambda: session.run_with_iobinding(binding, _run_options())

    def _bind(self, batch: int, nodes: int, slot: int, logit_nodes: Tensor) -> Sequence[Step]:
        """Return what enqueues a step of `batch` slots from `slot` on; see `StepTensors.ends`."""
        inputs, outputs = self.tensors.ends(self.spec, batch, nodes, logit_nodes)
        past, present = self.tensors.caches(slot, batch)
        inputs |= self.tensors.placed(batch, nodes)
        return [self._bound(self._session, inputs | past, outputs | present)]

    def close(self) -> None:
        """Free the session."""
        for graphs in (self._graphs, self._prefills, self._steps):
            graphs.clear()
        self._session = None


def _tensors(session: Any) -> dict[str, TensorInfo]:
    """Return a session's inputs and outputs in an engine's form, with every `present_*` as an alias of its `past_*`."""
    tensors = dict[str, TensorInfo]()
    for each in (*session.get_inputs(), *session.get_outputs()):
        dtype = each.type.removeprefix("tensor(").removesuffix(")")
        shape = tuple(size if isinstance(size, int) else -1 for size in each.shape or ())
        alias = each.name.replace("present_", "past_", 1) if each.name.startswith("present_") else None
        tensors[each.name] = TensorInfo(_TYPES.get(dtype, dtype), shape, alias)
    return tensors


@cache
def _run_options() -> Any:
    """Return a step's options: the host does not wait."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def open_on(graph: Path | GraphFile, provider: Provider, stream: int) -> Any:
    """Open a session with one provider only; CUDA's computes in full float32, never in TF32, on our stream."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # on a GPU the host computes next to nothing
    options.log_severity_level = _ERRORS
    providers: list[Any] = ["CPUExecutionProvider"]
    if provider == "cuda":
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise BundleError(f"ONNX Runtime {onnxruntime.__version__} has no CUDA here: pip install onnxruntime-gpu")
        cuda = {"user_compute_stream": str(stream), "use_tf32": "0"}
        providers = [("CUDAExecutionProvider", cuda)]
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")  # the CPU's must not be listed then
    session = open_session(graph, options, providers)
    if provider == "cuda" and "CUDAExecutionProvider" not in session.get_providers():  # it falls back silently
        raise BundleError("ONNX Runtime found no GPU it can use: pip install onnxruntime-gpu for this driver's CUDA")
    return session
