"""A bundle on a GPU: files, TensorRT, driver and memory checked, then engines or graphs loaded around one loop."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from specbuild.runtime.backends.executor import ModelSpec, spec_of
from specbuild.runtime.backends.gpu.cuda import Cuda
from specbuild.runtime.backends.gpu.device import Kernels, Model, PageTable
from specbuild.runtime.backends.gpu.executor import StandardExecutor
from specbuild.runtime.backends.gpu.pages import Pages
from specbuild.runtime.backends.gpu.plan import Plan, check_architecture, check_version, flavour
from specbuild.runtime.backends.gpu.tensorrt import TrtModel
from specbuild.runtime.backends.kernels.cubins import find_kernels
from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import MODULES
from specbuild.runtime.decoding.device.loop import DeviceLoop
from specbuild.runtime.decoding.device.resident import ResidentLoop
from specbuild.runtime.drafting.factory import drafter_of
from specbuild.runtime.drafting.model import DrafterName
from specbuild.runtime.errors import ExecutionError, OptionError

PROMPT_CHUNK = 512  # nodes of a prompt in a step, where no engine's profile says how many


def load_loop(
    bundle: Bundle,
    drafter: DrafterName | None,
    batch_size: int,
    resident: bool = False,
    weights: float | None = None,
    kv_cache_tokens: int | None = None,
) -> DeviceLoop:
    """The bundle's models on the first GPU, and the loop that drives them; on any error nothing stays there.

    resident: a loop whose rounds follow each other on the GPU, where no request needs the host in between. weights:
    the part of the target's that is on the GPU, where its engine streams them. kv_cache_tokens: of all texts together,
    in paged caches.

    Raises BundleError, OptionError and ExecutionError, each for the first thing that is wrong: a file, its TensorRT,
    the driver, the GPU it is for, the memory, the kernels, the plan.
    """
    manifest = bundle.manifest
    bundle.verify()  # before all else: a plan may hold code
    for record in manifest.engines.values():
        check_version(manifest.backend, record, str(flavour(manifest.backend).__version__))
    device = Cuda()
    try:
        for record in manifest.engines.values():
            check_architecture(manifest.backend, record, device.capability)
        names = [name for name in manifest.models if name == "target" or drafter != "ngram"]
        memory_plan.check(manifest, batch_size, device.memory[0], names, kv_cache_tokens, weights)
        with device.current:
            kernels = _Current(find_kernels(bundle, device.capability), device)
        specs = [spec_of(manifest, name) for name in names]
        count, rows = memory_plan.pages(manifest, batch_size, kv_cache_tokens), memory_plan.block_size(manifest)
        pages = PageTable(device, Pages(batch_size, specs[0].capacity, rows, count)) if rows else None
        executors = dict(zip(names, _executors(bundle, specs, device, batch_size, weights, pages), strict=True))
        eos = frozenset(manifest.eos_token_ids)
        made = ResidentLoop if resident else DeviceLoop
        target, draft = executors["target"], executors.get("draft")
        if draft is None or manifest.models["draft"].kind == "model":
            return made(target, draft, kernels, eos, drafter)
        hosted = drafter_of(bundle, draft, target, draft.model.buckets[-1], overlap=False)
        return made(target, None, kernels, eos, drafter, hosted=hosted)
    except BaseException:
        with suppress(ExecutionError):  # the first error is what went wrong
            device.close()
        raise


def _executors(
    bundle: Bundle,
    specs: Sequence[ModelSpec],
    device: Cuda,
    batch_size: int,
    weights: float | None,
    pages: PageTable | None,
) -> list[StandardExecutor]:
    """Each model on a stream of its own; engines share their scratch memory, for their steps never overlap."""
    if weights is not None and bundle.manifest.backend not in MODULES:
        raise OptionError(f"{bundle.manifest.backend} keeps all weights on the GPU: only engines stream them")
    manifest, streams = bundle.manifest, [device.stream() for _ in specs]
    graphs = [next(iter(manifest.models[spec.name].graphs.values())) for spec in specs]
    models: list[Model] = []
    if manifest.backend in MODULES:
        plans = [
            Plan(bundle.path(graph), manifest.backend, manifest.engines[graph], device, part)
            for graph, part in zip(graphs, (weights, None), strict=False)
        ]
        scratch = device.empty((max(plan.scratch_bytes for plan in plans),), np.uint8)
        shared = device, batch_size, scratch, pages
        models += [TrtModel(plan, spec, *shared) for plan, spec in zip(plans, specs, strict=True)]
    else:
        from specbuild.runtime.backends.gpu.onnxruntime_cuda import OrtModel  # which takes a while to import

        chunk = min(PROMPT_CHUNK, manifest.max_seq_len)
        models += [
            OrtModel(bundle.path(graph), spec, device, batch_size, manifest.buckets, chunk, "cuda", stream)
            for graph, spec, stream in zip(graphs, specs, streams, strict=True)
        ]
    return [StandardExecutor(device, model, stream) for model, stream in zip(models, streams, strict=True)]


class _Current:
    """Kernels launched in the device's context, whichever thread asks."""

    def __init__(self, kernels: Kernels, device: Cuda) -> None:
        self._kernels, self._device = kernels, device

    def launch(self, name: str, params: ctypes.Structure, stream: int = 0) -> None:
        """See `Kernels.launch`."""
        with self._device.current:
            self._kernels.launch(name, params, stream)

    def workspace(self, params: Any) -> int:
        """See `Kernels.workspace`."""
        return self._kernels.workspace(params)
