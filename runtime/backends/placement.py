"""Placement of a bundle's models on a GPU: checks TensorRT, driver and memory, then loads engines or graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.errors import ExecutionError

from .executor import spec_of
from .gpu.cuda import Cuda
from .gpu.executor import StandardExecutor
from .kernels.interface import Kernels
from .tensorrt import engines

FindKernels = Callable[[Bundle, str], Kernels]  # a bundle's kernels for a compute capability


@dataclass(frozen=True, slots=True)
class Placement:
    """Which models go to the GPU, for how many sequences.

    `weights`: the share of the target's weights to keep there, if its engine streams them; None: all.
    `kv_cache_tokens`: of all sequences together, in paged caches; None: as many as the slots have rows.
    """

    names: Sequence[str]
    batch_size: int
    weights: float | None = None
    kv_cache_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A bundle's models on one device, and the kernels that decode with them."""

    target: StandardExecutor
    draft: StandardExecutor | None
    kernels: Kernels


@contextmanager
def loaded(bundle: Bundle, placement: Placement, find_kernels: FindKernels) -> Iterator[Loaded]:
    """Load the models on the first GPU; on any error, those in the body of the `with` included, free it again.

    Args:
        bundle: The bundle.
        placement: Which of its models to load, and for how many sequences.
        find_kernels: Returns a bundle's kernels for a compute capability.

    Raises:
        BundleError, OptionError, ExecutionError: For the first thing that is wrong, in this order: the installed
            TensorRT, the driver, the GPU's architecture, the memory, the kernels, the plans or graphs.
    """
    manifest = bundle.manifest
    engines.check_installed(manifest)
    device = Cuda()
    try:
        engines.check_gpu(manifest, device.capability)
        options = placement.names, placement.kv_cache_tokens, placement.weights
        memory_plan.check(manifest, placement.batch_size, device.memory[0], *options)
        with device.current:
            kernels = ContextKernels(find_kernels(bundle, device.capability), device)
        executors = dict(zip(placement.names, _executors(bundle, placement, device, kernels), strict=True))
        yield Loaded(executors["target"], executors.get("draft"), kernels)
    except BaseException:
        with suppress(ExecutionError):  # the first error is what went wrong
            device.close()
        raise


def _executors(bundle: Bundle, placement: Placement, device: Cuda, kernels: Kernels) -> list[StandardExecutor]:
    """Make an executor for each model, each on a stream of its own."""
    specs = [spec_of(bundle.manifest, name) for name in placement.names]
    if bundle.manifest.descriptor.compiles:
        sizes = placement.batch_size, placement.weights, placement.kv_cache_tokens
        models = engines.load(bundle, specs, device, *sizes)
        return [StandardExecutor(device, model, device.stream()) for model in models]
    from .onnxruntime_cuda.graphs import load  # slow to import

    graphs = load(bundle, specs, device, placement.batch_size, kernels)
    return [StandardExecutor(device, model, model.stream) for model in graphs]


class ContextKernels:
    """Kernels that are launched in the device's context, from any thread."""

    def __init__(self, kernels: Kernels, device: Cuda) -> None:
        self._kernels, self._device = kernels, device

    def launch(self, name: str, params: ctypes.Structure, stream: int = 0) -> None:
        """See `Kernels.launch`."""
        with self._device.current:
            self._kernels.launch(name, params, stream)

    def workspace(self, params: Any) -> int:
        """See `Kernels.workspace`."""
        return self._kernels.workspace(params)

    def splits(self, params: Any, processors: int) -> int:
        """See `Kernels.splits`."""
        return self._kernels.splits(params, processors)
