"""Execution contexts: what is bound is checked when a run is enqueued, and computed when the stream comes to it."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import card_driver
import numpy as np
from card_onnxruntime import Bound, bind

from . import names
from .plan import CAPABILITY, VERSION, HostMemory

_ALIGNMENT = 256  # bytes, of every address
_RUBBISH = 0xA5  # what a run leaves in its scratch memory
_KINDS = {
    "BF16": 16,
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
}
compilations = []  # what this process has compiled: an engine, a profile and shapes
Shape = tuple[int, ...]


class IRuntimeCache:
    """What contexts have compiled."""

    def __init__(self):
        self.known = set[str]()

    def serialize(self):
        return HostMemory(json.dumps({"by": [VERSION, CAPABILITY], "known": sorted(self.known)}).encode())

    def deserialize(self, data):
        """False for what another version or card made."""
        try:
            said = json.loads(bytes(data))
        except ValueError:
            return False
        if said.get("by") != [VERSION, CAPABILITY]:
            return False
        self.known |= set(said["known"])
        return True

    def reset(self):
        self.known.clear()


class IRuntimeConfig:
    """How contexts run."""

    cuda_graph_strategy = names.CudaGraphStrategy.DISABLED
    dynamic_shapes_kernel_specialization_strategy = names.DynamicShapesKernelSpecializationStrategy.LAZY

    def __init__(self):
        self._allocation = names.ExecutionContextAllocationStrategy.STATIC
        self._cache: IRuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, strategy):
        self._allocation = names.ExecutionContextAllocationStrategy(strategy)

    def get_execution_context_allocation_strategy(self):
        return self._allocation

    def create_runtime_cache(self):
        return IRuntimeCache()

    def set_runtime_cache(self, cache):
        self._cache = cache
        return True

    def get_runtime_cache(self):
        return self._cache


class _RefusedError(Exception):
    """Why a call is refused."""


class IExecutionContext:
    """Calls return whether they worked; why not is in the log."""

    def __init__(self, engine, config):
        self.engine, self._config = engine, config
        self._profile, self._shapes, self._addresses = 0, dict[str, Shape](), dict[str, int]()
        managed = names.ExecutionContextAllocationStrategy.USER_MANAGED
        self._scratch: tuple[int, int] | None = None
        self._managed = config.get_execution_context_allocation_strategy() == managed
        self._ready = set[str]()

    def set_device_memory(self, address, size):
        if address % _ALIGNMENT or size < self.engine.device_memory_size_v2:
            raise RuntimeError(f"scratch memory of {size} bytes at {address:#x}")
        self._scratch = address, size

    def set_optimization_profile_async(self, index, stream):
        def switch():
            card_driver.check_stream(stream)
            if not 0 <= index < self.engine.num_optimization_profiles:
                raise _RefusedError(f"there is no profile {index}")
            self._profile = index
            self._shapes.clear()

        return self._try(switch)

    def set_input_shape(self, name, shape):
        def keep():
            self._check_shape(name, tuple(shape))
            self._shapes[name] = tuple(shape)

        return self._try(keep)

    def set_tensor_address(self, name, address):
        def keep():
            if name not in self.engine.tensors:
                raise _RefusedError(f"there is no tensor {name}")
            if address % _ALIGNMENT:
                raise _RefusedError(f"{name} at {address:#x} is not aligned to {_ALIGNMENT} bytes")
            self._addresses[name] = address

        return self._try(keep)

    def is_stream_capturable(self, stream):
        card_driver.check_stream(stream)
        return True

    def execute_async_v3(self, stream):
        """Enqueue a run of what is bound now; a first one of its shapes compiles, which no capture outlasts."""

        def enqueue():
            card_driver.check_stream(stream)
            shapes = self._all_shapes()
            inputs, outputs = self._bound(shapes, False), self._bound(shapes, True)
            self._check_memory((*inputs, *outputs))
            self._compile(shapes, stream)
            binding = inputs, outputs
            card_driver.enqueue(stream, lambda: self._run(binding))

        return self._try(enqueue)

    def _try(self, call):
        try:
            call()
        except (_RefusedError, RuntimeError) as error:
            self.engine.log.log(names.ILogger.ERROR, f"IExecutionContext: Error Code 3: {error}")
            return False
        return True

    def _check_shape(self, name, shape):
        tensor = self.engine.tensors.get(name)
        if tensor is None or tensor.output:
            raise _RefusedError(f"there is no input {name}")
        least, _, largest = self.engine.get_tensor_profile_shape(name, self._profile)
        fits = len(shape) == len(least) and all(a <= x <= b for a, x, b in zip(least, shape, largest, strict=True))
        if not fits:
            raise _RefusedError(f"{name} has {shape}, profile {self._profile} from {least} to {largest}")

    def _all_shapes(self):
        """Every tensor's; dimensions of one name are the same in all."""
        sizes = dict[Any, int]()
        for tensor in self.engine.inputs():
            shape = self._shapes.get(tensor.name)
            if shape is None and any(isinstance(dim, str) for dim in tensor.dims):
                raise _RefusedError(f"{tensor.name} has no shape in profile {self._profile}")
            for dim, size in zip(tensor.dims, shape or tensor.dims, strict=True):
                if sizes.setdefault(dim, size) != size:
                    raise _RefusedError(f"{tensor.name} has {size} for {dim}, others {sizes[dim]}")
        return {name: tuple(sizes.get(dim, dim) for dim in tensor.dims) for name, tensor in self.engine.tensors.items()}

    def _bound(self, shapes, output):
        found = list[Bound]()
        for tensor in (each for each in self.engine.content.tensors if each.output == output):
            address = self._addresses.get(tensor.name)
            if address is None:
                raise _RefusedError(f"{tensor.name} has no address")
            if tensor.alias and address != self._addresses.get(tensor.alias):
                raise _RefusedError(f"{tensor.name} is not where {tensor.alias} is, which it aliases")
            found.append(Bound(tensor.name, _KINDS[tensor.dtype], shapes[tensor.name], address))
        return tuple(found)

    def _check_memory(self, bound):
        for each in bound:
            card_driver.check_memory(each.name, each.address, each.nbytes)
        if self._managed:
            if self._scratch is None:
                raise _RefusedError("there is no scratch memory")
            card_driver.check_memory("the scratch memory", *self._scratch)

    def _compile(self, shapes, stream):
        """Kernels for these shapes: of this context, else the cache's, else new ones."""
        said = " ".join(f"{each.name}{list(shapes[each.name])}" for each in self.engine.inputs())
        key = f"{self.engine.digest[:16]} {self._profile} {said}"
        if key in self._ready:
            return
        if card_driver.capturing(stream):
            with_what = "a first run of these shapes compiles, or loads what was compiled"
            self.engine.log.log(names.ILogger.ERROR, f"IExecutionContext: {with_what}, in a capture: {said}")
            card_driver.wait(stream)  # raises, and the capture is broken
        cache = self._config.get_runtime_cache()
        if cache is None or key not in cache.known:
            compilations.append(key)
        if cache is not None:
            cache.known.add(key)
        self._ready.add(key)

    def _run(self, binding):
        """From and to the bound memory; the scratch memory is this run's alone."""
        if self._scratch:
            ctypes.memset(self._scratch[0], _RUBBISH, self.engine.device_memory_size_v2)
        bindings = self.engine.bindings
        if binding not in bindings:
            bindings[binding] = bind(self.engine.session, binding)
        self.engine.session.run_with_iobinding(bindings[binding])
