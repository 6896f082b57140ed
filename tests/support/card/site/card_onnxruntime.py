"""ONNX Runtime's CUDA provider by its CPU's: as strict, and as late: a run is enqueued on its stream."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any, NamedTuple

import card_driver
import numpy as np

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
OPTIONS = {"device_id": "0", "user_compute_stream": "0", "use_tf32": "1"}
ON_CPU = {"Shape", "Size", "Range", "ConstantOfShape"}  # nodes that the CUDA provider leaves to the CPU's
_BFLOAT16 = 16
_LATE = "disable_synchronize_execution_providers"
_MOST_BINDINGS = 256  # that a session keeps


class Bound(NamedTuple):
    """An input or output in the device's memory."""

    name: str
    kind: Any
    shape: tuple[int, ...]
    address: int

    @property
    def nbytes(self):
        return math.prod(self.shape) * (2 if self.kind == _BFLOAT16 else np.dtype(self.kind).itemsize)


Binding = tuple[tuple[Bound, ...], tuple[Bound, ...]]


class IOBinding:
    """What is bound, by address alone."""

    def __init__(self):
        self._inputs, self._outputs = dict[str, Bound](), dict[str, Bound]()

    def bind_input(self, name, device, number, kind, shape, address):
        self._inputs[name] = _bound(name, device, number, kind, shape, address)

    def bind_output(self, name, device, number, kind, shape, address):
        self._outputs[name] = _bound(name, device, number, kind, shape, address)

    @property
    def now(self):
        """What a run is given."""
        return tuple(self._inputs.values()), tuple(self._outputs.values())


def _bound(name, device, number, kind, shape, address):
    if (device, number) != ("cuda", 0):
        raise RuntimeError(f"{name} is bound to {device} {number}, and the stand-in is cuda 0")
    found = Bound(name, kind, tuple(shape), address)
    card_driver.check_memory(name, address, found.nbytes)
    return found


class CudaSession:
    """A session on the stand-in; see `onnxruntime.InferenceSession`."""

    def __init__(self, model, options, asked, others, real):
        """`asked`: of the provider; `others`: the further providers' names; `real`: the class of sessions."""
        if unknown := asked.keys() - OPTIONS.keys():
            raise RuntimeError(f"Unknown provider option: {min(unknown)}")
        asked = OPTIONS | asked
        self._stream = int(asked["user_compute_stream"])
        _switch("use_tf32", asked)
        card_driver.check_stream(self._stream)
        if options and _entry(options.get_session_config_entry, "session.disable_cpu_ep_fallback") == "1":
            _check_nodes(model, others)
        self._lock = threading.Lock()
        self._inner = _inner(real, model, options)
        self.get_inputs, self.get_outputs = self._inner.get_inputs, self._inner.get_outputs
        self._bindings: dict[Binding, Any] = {}
        self._shapes = set[tuple[Any, ...]]()  # of what has run: later runs of these allocate nothing

    def get_providers(self):
        return [CUDA, CPU]

    def io_binding(self):
        return IOBinding()

    def run(self, names, feeds, options=None):
        """At once, from and to the host's memory."""
        card_driver.wait(self._stream)
        return self._inner.run(names, feeds)

    def run_with_iobinding(self, binding, options=None):
        """Enqueue a run, or record it in a capture, which a first run of its shapes breaks: it allocates."""
        if card_driver.failures:
            raise RuntimeError(f"CUDA failure: {card_driver.failures[0]}")
        now = binding.now
        self._check(now)
        shapes = tuple(each.shape for part in now for each in part)
        if shapes not in self._shapes and card_driver.capturing(self._stream):
            card_driver.wait(self._stream)
        self._shapes.add(shapes)
        self._enqueue(now)
        if _entry(options.get_run_config_entry if options else lambda name: "", _LATE) != "1":
            card_driver.wait(self._stream)

    def _check(self, now):
        """Raises RuntimeError where something is not bound."""
        for bound, wanted in zip(now, (self.get_inputs(), self.get_outputs()), strict=True):
            if missing := {each.name for each in wanted} - {each.name for each in bound}:
                raise RuntimeError(f"Missing Input: {min(missing)}")

    def _enqueue(self, binding):
        card_driver.enqueue(self._stream, lambda: self._run(binding))

    def _run(self, binding):
        """On the CPU, from and to the bound memory."""
        with self._lock:
            if binding not in self._bindings:
                if len(self._bindings) >= _MOST_BINDINGS:
                    self._bindings.clear()
                self._bindings[binding] = bind(self._inner, binding)
            self._inner.run_with_iobinding(self._bindings[binding])


def bind(session, binding):
    """The same memory as the CPU provider takes it."""
    inner = session.io_binding()
    for method, bound in zip((inner.bind_input, inner.bind_output), binding, strict=True):
        for each in bound:
            method(each.name, "cpu", 0, each.kind, each.shape, each.address)
    return inner


def _entry(ask, name):
    """A configuration's entry; "" where there is none."""
    try:
        return str(ask(name))
    except RuntimeError:
        return ""


def _switch(name, asked):
    if asked[name] not in ("0", "1"):
        raise RuntimeError(f"{name} is {asked[name]!r}, not 0 or 1")
    return asked[name] == "1"


def _check_nodes(model, others):
    """Raises RuntimeError for what a session that leaves nothing to the CPU refuses."""
    if CPU in others:
        raise RuntimeError("Conflicting session configuration: explicitly added the CPU EP, but CPU EP fallback is off")
    import onnx

    data = onnx.load_from_string(model) if isinstance(model, bytes) else onnx.load(model, load_external_data=False)
    left = sorted({node.op_type for node in data.graph.node} & ON_CPU)
    if left:
        raise RuntimeError(f"This session contains graph nodes that are assigned to the default CPU EP: {left}")


def _inner(real, model, options):
    """The CPU's session of a model, as the options have it."""
    import onnxruntime

    kept = onnxruntime.SessionOptions()
    kept.intra_op_num_threads = 1
    if options:
        kept.log_severity_level = options.log_severity_level
        kept.graph_optimization_level = options.graph_optimization_level
        if external := getattr(options, "external", None):
            kept.add_external_initializers(*external)
    try:
        return real(model, kept, providers=[CPU])
    except Exception as error:
        what = "the stand-in's CPU provider lacks an operator in this type, as in bfloat16"
        raise RuntimeError(f"{what}: {error}" if "NOT_IMPLEMENTED" in str(error) else str(error)) from error


def change(module):
    """`onnxruntime` with the provider."""
    real, providers = module.InferenceSession, module.get_available_providers

    class SessionOptions(module.SessionOptions):
        """Says what it was given, which the real ones do not."""

        def add_external_initializers(self, names, values):
            self.external = names, values
            super().add_external_initializers(names, values)

    class InferenceSession(real):
        """A session on the stand-in where its provider is asked for first, else the real one."""

        def __new__(cls, model=None, sess_options=None, providers=None, *rest, **more):
            each = [(name, {}) if isinstance(name, str) else name for name in providers or ()]
            if CUDA not in [name for name, _ in each]:
                return super().__new__(cls)
            data = str(model) if isinstance(model, Path) else model
            return CudaSession(data, sess_options, dict(each)[CUDA], [n for n, _ in each if n != CUDA], real)

    module.InferenceSession, module.SessionOptions = InferenceSession, SessionOptions
    module.get_available_providers = lambda: [CUDA, *providers()]
