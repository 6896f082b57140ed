"""A bundle's graphs, as models on one GPU."""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.cuda import Cuda
from specbuild.runtime.backends.kernels.interface import Kernels
from specbuild.runtime.backends.onnx_graph import GraphFile
from specbuild.runtime.bundle.bundle import Bundle

from .model import OrtModel, RunContext
from .parts_file import PARTS
from .parts_model import Parts, PartsModel

PROMPT_CHUNK = 512  # nodes of a prefill chunk


def load(bundle: Bundle, specs: Sequence[ModelSpec], device: Cuda, batch_size: int, kernels: Kernels) -> list[OrtModel]:
    """Load graphs, each on a stream of its own."""
    manifest, models = bundle.manifest, list[OrtModel]()
    sizes = batch_size, manifest.buckets, min(PROMPT_CHUNK, manifest.max_seq_len)
    for spec in specs:
        name = next(iter(manifest.models[spec.name].graphs.values()))
        graph, context = GraphFile.of(bundle, name), RunContext(device, device.stream(), "cuda", *sizes)
        if name.endswith(PARTS):
            models.append(PartsModel(Parts(graph, kernels, device.multiprocessors), spec, context))
        else:
            models.append(OrtModel(graph, spec, context))
    return models
