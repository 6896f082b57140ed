"""A compiled plan of TensorRT or TensorRT-RTX: the checks before it runs, and the engine made from it.

TensorRT's messages become the reasons in our errors; it prints nothing, unless its log is wanted.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specbuild.runtime.backends.gpu.cuda import Cuda
from specbuild.runtime.backends.gpu.device import Tensor
from specbuild.runtime.backends.gpu.tensors import TensorInfo
from specbuild.runtime.backends.kernels.library import BLOCK_SIZES, PLUGIN, PLUGIN_VERSION, find_library
from specbuild.runtime.bundle.backend import Backend
from specbuild.runtime.bundle.manifest import EngineRecord
from specbuild.runtime.errors import BundleError, ExecutionError, OptionError, one_line

from .runtime_cache import RuntimeCache

LOG = "SPECBUILD_TENSORRT_LOG"  # "verbose": TensorRT's messages of all kinds go to standard error
_HEADER = 64  # bytes, `Runtime.engine_header_size`
_log = logging.getLogger(__name__)
Profile = Mapping[str, tuple[int, int, int]]  # min, opt, max of "batch", "nodes"; of a plugin's "tree", "pages"


def flavour(backend: Backend) -> Any:
    """Import the Python module of a backend that has engines; raise BundleError if it is not installed."""
    try:
        return importlib.import_module(str(backend.package))
    except ImportError as error:
        name = backend.name
        raise BundleError(f"the bundle needs {name} ({one_line(error)}): pip install {name}") from None


def verbose() -> bool:
    """Return whether TensorRT's own messages are wanted on standard error."""
    return os.environ.get(LOG, "").lower() == "verbose"


@functools.cache
def logger(trt: Any) -> Any:
    """Return a flavour's log, one per process; it keeps the first error since `clear`, which causes the later ones."""

    class Log(trt.ILogger):  # type: ignore[misc]
        first: str | None = None

        def log(self, severity: Any, message: str) -> None:
            if verbose():
                sys.stderr.write(f"{trt.__name__}: {severity.name}: {message}\n")
            if severity <= trt.ILogger.ERROR and self.first is None:
                self.first = " ".join(message.split())

        def clear(self) -> None:
            self.first = None

        @property
        def reason(self) -> str:
            return self.first or "no reason given"

    return Log()


def check_version(backend: Backend, record: EngineRecord, installed: str) -> None:
    """Raise BundleError if a plan was compiled by a TensorRT version that `installed` cannot run: a plan fits one."""
    parts = 1 if record.version_compatible else None
    if record.version.split(".")[:parts] != installed.split(".")[:parts]:
        raise BundleError(
            f"the plan was compiled by {backend.name} {record.version}, installed is {installed}: "
            f"pip install {backend.name}=={record.version}, or build the bundle again"
        )


def check_architecture(backend: Backend, record: EngineRecord, capability: str) -> None:
    """Raise BundleError if a plan was compiled for other GPUs; `capability` is such as "89"."""
    built = [name.rstrip("af") for name in record.architectures or backend.architectures]
    newer = record.hardware_compatible == "ampere-plus" and int(capability) >= 80
    if built and capability not in built and not newer:
        names = ", ".join(f"sm_{name}" for name in built)
        raise BundleError(f"the plan was compiled for {names}, this GPU is sm_{capability}: build the bundle for it")


def check_attention(record: EngineRecord) -> None:
    """Raise BundleError if this specbuild does not have a plan's attention, cache type or page size."""
    if (record.attention, record.plugin) not in (("native", None), ("plugin", PLUGIN_VERSION)):
        raise BundleError(
            f"the plan's attention is {record.attention} {record.plugin or ''}".rstrip()
            + f", this specbuild has native and plugin {PLUGIN_VERSION}: build the bundle again"
        )
    if record.kv_cache_dtype != "auto" and (record.attention, record.kv_cache_dtype) != ("plugin", "fp8"):
        raise BundleError(
            f"the plan's attention is {record.attention} over caches of {record.kv_cache_dtype}, this specbuild has "
            "fp8 with plugin alone: build the bundle again"
        )
    if record.block_size and (record.attention != "plugin" or record.block_size not in BLOCK_SIZES):
        raise BundleError(
            f"the plan's attention is {record.attention} over pages of {record.block_size} rows, this specbuild has "
            f"{', '.join(map(str, BLOCK_SIZES))} with plugin alone: build the bundle again"
        )


def load_plugin(trt: Any) -> None:
    """Register TreeAttention with a flavour, from this installation's library; raise ExecutionError without one."""
    registry, log, name = trt.get_plugin_registry(), logger(trt), ("TreeAttention", PLUGIN_VERSION, "specbuild")
    if registry.get_creator(*name) is not None:
        return
    path = find_library(PLUGIN)
    if path is None:
        raise ExecutionError(
            f"TreeAttention's {PLUGIN} is not installed: compile it with -DSPECBUILD_TENSORRT=ON (plugins/README.md)"
        )
    log.clear()
    if registry.load_library(str(path)) is None or registry.get_creator(*name) is None:
        raise ExecutionError(
            f"{path} has no TreeAttention {PLUGIN_VERSION} for TensorRT {trt.__version__} ({log.reason}): compile it"
        )


def check_profiles(record: EngineRecord, profiles: list[Profile]) -> None:
    """Raise BundleError if a plan's profiles are not those of its record."""
    names = ["batch", "nodes", *(["tree"] if record.attention == "plugin" else [])]
    names += ["pages"] if record.block_size else []
    expected = [{name: tuple(sizes.get(name, ())) for name in names} for sizes in record.profiles.values()]
    if expected != profiles:
        raise BundleError(f"the plan has profiles {profiles}, its record {expected}: build the bundle again")


class PlanFile(NamedTuple):
    """A plan's name and its bytes; a bundle's are those that were hashed."""

    name: str
    data: mmap.mmap | bytes

    @classmethod
    def at(cls, path: Path) -> PlanFile:
        """Open a file that this program wrote itself."""
        with path.open("rb") as file:
            return cls(path.name, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b"")


def deserialise(trt: Any, backend: Backend, file: PlanFile, host_code: bool) -> tuple[Any, Any]:
    """Return the runtime and the engine of a plan; raise BundleError with TensorRT's own reason.

    Without a driver TensorRT (not RTX) ends the process. `host_code`: let a version-compatible plan bring its own code.
    """
    log = logger(trt)
    runtime = trt.Runtime(log)
    runtime.engine_host_code_allowed = host_code
    engine, reason = None, "it is cut off"
    if len(file.data) > _HEADER:
        reason = invalidity(trt, runtime, file)
        log.clear()
        engine = None if reason else runtime.deserialize_cuda_engine(file.data)
    if engine is None:
        reason = reason or log.reason
        raise BundleError(f"{file.name} does not load in {backend.name} {trt.__version__}: {reason}; build it again")
    return runtime, engine


def invalidity(trt: Any, runtime: Any, file: PlanFile) -> str:
    """Return why TensorRT-RTX refuses a plan's header, in its words; "" if it takes it, and always for TensorRT.

    A plan that is merely suboptimal here is taken, with a warning.
    """
    if not hasattr(runtime, "get_engine_validity"):
        return ""
    validity, flags = runtime.get_engine_validity(file.data[:_HEADER])
    reasons = [name for name, flag in trt.EngineInvalidityDiagnostics.__members__.items() if flags & flag.value]
    reason = ", ".join(reasons).lower().replace("_", " ")
    if validity == trt.EngineValidity.SUBOPTIMAL:
        _log.warning("%s runs here, but slower than one that is built for this GPU: %s", file.name, reason)
    return (reason or "invalid") if validity == trt.EngineValidity.INVALID else ""


def limit_weights(engine: Any, name: str, share: float) -> None:
    """Keep `share` of an engine's streamable weights on the GPU; every step streams the others from the host.

    The engine must have no context yet. Raises OptionError if the plan cannot stream, ExecutionError if this fails.
    """
    if not engine.streamable_weights_size:
        raise OptionError(f"{name} keeps all weights on the GPU: build it with --weight-streaming to leave some out")
    engine.weight_streaming_budget_v2 = budget = int(share * engine.streamable_weights_size)
    if engine.weight_streaming_budget_v2 != budget:
        raise ExecutionError(
            f"TensorRT does not keep {budget >> 20} MiB of {name}'s weights on the GPU: take another part"
        )


class Plan:
    """A deserialised plan, which takes GPU memory for its weights only."""

    def __init__(
        self,
        file: PlanFile | Path,
        backend: Backend,
        record: EngineRecord,
        device: Cuda,
        weights: float | None = None,
        cache: Path | None = None,
    ) -> None:
        """Deserialise a plan, of this TensorRT's version and for this GPU.

        Args:
            file: The plan, or the path of one that this program wrote itself.
            backend: The backend that runs it.
            record: The plan's record in the manifest.
            device: The GPU.
            weights: The share of the weights to keep on the GPU; None: all that the plan keeps there.
            cache: The file of what TensorRT-RTX compiled for this GPU before (`RuntimeCache`); None: no file.

        Raises:
            BundleError: If the plan does not load.
            OptionError, ExecutionError: See `limit_weights` and `load_plugin`.
        """
        self.trt = flavour(backend)
        check_attention(record)
        file = PlanFile.at(file) if isinstance(file, Path) else file
        self.record, self._log = record, logger(self.trt)
        self._cache = RuntimeCache(cache) if cache else None
        if record.attention == "plugin":
            load_plugin(self.trt)
        with device.current:
            self._runtime, self.engine = deserialise(self.trt, backend, file, record.version_compatible)
            if weights is not None:
                limit_weights(self.engine, file.name, weights)

    @property
    def profiles(self) -> list[Profile]:
        """The plan's profiles, in order."""
        engine, shapes = self.engine, list[Profile]()
        for index in range(engine.num_optimization_profiles):
            batch, nodes = zip(*engine.get_tensor_profile_shape("input_ids", index), strict=True)
            shapes.append({"batch": batch, "nodes": nodes})
            if self.record.attention == "plugin":
                _, tree = zip(*engine.get_tensor_profile_shape("parents", index), strict=True)
                shapes[-1] = {**shapes[-1], "tree": tree}
            if self.record.block_size:
                pages, *_ = zip(*engine.get_tensor_profile_shape("past_key.0", index), strict=True)
                shapes[-1] = {**shapes[-1], "pages": pages}
        return shapes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that the most demanding profile needs."""
        return int(self.engine.device_memory_size_v2)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The plan's inputs and outputs, by name."""
        engine, tensors = self.engine, {}
        for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
            output = engine.get_tensor_mode(name) == self.trt.TensorIOMode.OUTPUT
            alias = (engine.get_aliased_input_tensor(name) or None) if output else None
            shape = tuple(engine.get_tensor_shape(name))
            tensors[name] = TensorInfo(engine.get_tensor_dtype(name).name, shape, alias)
        return tensors

    def inspect(self) -> list[Any]:
        """Return TensorRT's report on each layer: name, kind, types and kernel, as the plan was built to tell."""
        inspector = self.engine.create_engine_inspector()
        text = inspector.get_engine_information(self.trt.LayerInformationFormat.JSON)
        layers: list[Any] = json.loads(text)["Layers"]
        return layers

    @functools.cached_property
    def _config(self) -> Any:
        """Flags of contexts: in our memory, and with kernels for a shape compiled before its first run."""
        config = self.engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if hasattr(config, "cuda_graph_strategy"):
            config.cuda_graph_strategy = self.trt.CudaGraphStrategy.DISABLED  # graphs are captured by the caller
            strategy = self.trt.DynamicShapesKernelSpecializationStrategy.EAGER
            config.dynamic_shapes_kernel_specialization_strategy = strategy
        if self._cache and hasattr(config, "create_runtime_cache"):
            self._cache.attach(config)
        return config

    def context(self, profile: int, scratch: Tensor, stream: int) -> Any:
        """Return an execution context of a profile; raise ExecutionError if TensorRT cannot make one."""
        self._log.clear()
        context = self.engine.create_execution_context(self._config)
        if context is None:
            raise ExecutionError(f"TensorRT cannot make a context: {self._log.reason}")
        context.set_device_memory(scratch.address, scratch.nbytes)
        self.call(context.set_optimization_profile_async, profile, stream)
        return context

    def keep_compiled(self) -> None:
        """Save what the contexts have compiled, so that the next load compiles nothing."""
        if self._cache:
            self._cache.save()

    def call(self, method: Callable[..., bool], *arguments: Any) -> None:
        """Call a method that returns whether it worked; raise ExecutionError with TensorRT's reason if it did not."""
        self._log.clear()
        if not method(*arguments):
            raise ExecutionError(f"TensorRT failed in {method.__name__}: {self._log.reason}")

    def close(self) -> None:
        """Free the weights; no context may be left."""
        self.__dict__.pop("_config", None)
        del self.engine, self._runtime
