"""Load a bundle's models on a GPU: check TensorRT, driver and memory, then load engines or graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbuild.runtime.backends.executor import ModelSpec, spec_of
from specbuild.runtime.backends.kernels.interface import Kernels
from specbuild.runtime.backends.onnx_graph import GraphFile
from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.errors import ExecutionError

from .cuda import Cuda
from .device import Model, PageTable
from .executor import StandardExecutor
from .pages import Pages
from .plan import Plan, PlanFile, check_architecture, check_version, flavour
from .runtime_cache import cache_path
from .tensorrt import TrtModel

FindKernels = Callable[[Bundle, str], Kernels]  # a bundle's kernels for a compute capability
PROMPT_CHUNK = 512  # nodes of a prefill chunk, where no engine's profile says how many


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
    backend = manifest.descriptor
    for record in manifest.engines.values():
        check_version(backend, record, str(flavour(backend).__version__))
    device = Cuda()
    try:
        for record in manifest.engines.values():
            check_architecture(backend, record, device.capability)
        asked = placement.names, placement.kv_cache_tokens, placement.weights
        memory_plan.check(manifest, placement.batch_size, device.memory[0], *asked)
        with device.current:
            kernels = _Current(find_kernels(bundle, device.capability), device)
        executors = dict(zip(placement.names, _executors(bundle, placement, device, kernels), strict=True))
        yield Loaded(executors["target"], executors.get("draft"), kernels)
    except BaseException:
        with suppress(ExecutionError):  # the first error is what went wrong
            device.close()
        raise


def _executors(bundle: Bundle, placement: Placement, device: Cuda, kernels: Kernels) -> list[StandardExecutor]:
    """Make an executor for each model, each on a stream of its own."""
    specs = [spec_of(bundle.manifest, name) for name in placement.names]
    compiled = bundle.manifest.descriptor.compiles
    made = (
        _engines(bundle, placement, specs, device) if compiled else _graphs(bundle, placement, specs, device, kernels)
    )
    return [StandardExecutor(device, model, stream) for model, stream in made]


def _files(bundle: Bundle, specs: Sequence[ModelSpec]) -> list[str]:
    return [next(iter(bundle.manifest.models[spec.name].graphs.values())) for spec in specs]


def _engines(bundle: Bundle, placement: Placement, specs: Sequence[ModelSpec], device: Cuda) -> list[tuple[Model, int]]:
    """Load engines; they share scratch memory, because their steps never overlap."""
    manifest, batch_size = bundle.manifest, placement.batch_size
    count, rows = memory_plan.pages(manifest, batch_size, placement.kv_cache_tokens), memory_plan.block_size(manifest)
    pages = PageTable(device, Pages(batch_size, specs[0].capacity, rows, count)) if rows else None
    plans = [
        Plan(
            PlanFile(graph, bundle.map(graph)),
            manifest.descriptor,
            manifest.engines[graph],
            device,
            part,
            cache_path(bundle.folder, spec.name, manifest.files[graph].sha256, device.capability),
        )
        for spec, graph, part in zip(specs, _files(bundle, specs), (placement.weights, None), strict=False)
    ]
    scratch = device.empty((max(plan.scratch_bytes for plan in plans),), np.uint8)
    models = [TrtModel(plan, spec, device, batch_size, scratch, pages) for plan, spec in zip(plans, specs, strict=True)]
    return [(model, device.stream()) for model in models]


def _graphs(
    bundle: Bundle, placement: Placement, specs: Sequence[ModelSpec], device: Cuda, kernels: Kernels
) -> list[tuple[Model, int]]:
    from .onnxruntime_cuda import OrtModel  # slow to import
    from .parts import PARTS, Parts, PartsModel

    manifest, models = bundle.manifest, list[OrtModel]()
    sizes = placement.batch_size, manifest.buckets, min(PROMPT_CHUNK, manifest.max_seq_len)
    for name, spec in zip(_files(bundle, specs), specs, strict=True):
        graph, stream = GraphFile.of(bundle, name), device.stream()
        if name.endswith(PARTS):
            parts = Parts(graph, kernels, device.multiprocessors)
            models.append(PartsModel(parts, spec, device, *sizes, "cuda", stream))
        else:
            models.append(OrtModel(graph, spec, device, *sizes, "cuda", stream))
    return [(model, model.stream) for model in models]


class _Current:
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
