"""A bundle's engines: whether they run here, and the models on one GPU that they become."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.cuda import Cuda
from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import Manifest

from .model import TrtModel
from .pages import PageTable
from .plan import Plan, PlanFile, check_architecture, check_version, flavour
from .runtime_cache import cache_path


def check_installed(manifest: Manifest) -> None:
    """Raise BundleError if this installation's TensorRT cannot run a bundle's engines."""
    for record in manifest.engines.values():
        check_version(manifest.descriptor, record, str(flavour(manifest.descriptor).__version__))


def check_gpu(manifest: Manifest, capability: str) -> None:
    """Raise BundleError if a bundle's engines were compiled for other GPUs."""
    for record in manifest.engines.values():
        check_architecture(manifest.descriptor, record, capability)


def load(
    bundle: Bundle,
    specs: Sequence[ModelSpec],
    device: Cuda,
    batch_size: int,
    weights: float | None,
    kv_cache_tokens: int | None,
) -> list[TrtModel]:
    """Load engines; they share scratch memory, because their steps never overlap.

    Args:
        bundle: The bundle.
        specs: The models to load, the target first.
        device: The GPU.
        batch_size: The number of slots.
        weights: The share of the target's weights to keep on the GPU; None: all.
        kv_cache_tokens: Of all sequences together, in paged caches; None: as many as the slots have rows.
    """
    manifest = bundle.manifest
    count, rows = memory_plan.pages(manifest, batch_size, kv_cache_tokens), memory_plan.block_size(manifest)
    pages = PageTable(device, batch_size, specs[0].capacity, rows, count) if rows else None
    plans = [_plan(bundle, spec, device, None if at else weights) for at, spec in enumerate(specs)]
    scratch = device.empty((max(plan.scratch_bytes for plan in plans),), np.uint8)
    return [TrtModel(plan, spec, device, batch_size, scratch, pages) for plan, spec in zip(plans, specs, strict=True)]


def _plan(bundle: Bundle, spec: ModelSpec, device: Cuda, weights: float | None) -> Plan:
    manifest = bundle.manifest
    graph = next(iter(manifest.models[spec.name].graphs.values()))
    cache = cache_path(bundle.folder, spec.name, manifest.files[graph].sha256, device.capability)
    file = PlanFile(graph, bundle.map(graph))
    return Plan(file, manifest.descriptor, manifest.engines[graph], device, weights, cache)
