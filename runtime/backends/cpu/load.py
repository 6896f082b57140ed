"""A bundle's models on a CPU."""

from __future__ import annotations

import logging
from dataclasses import replace

from specbuild.runtime.backends.executor import spec_of
from specbuild.runtime.backends.onnx_graph import GraphFile
from specbuild.runtime.bundle.bundle import Bundle

from .cores import cores
from .executor import OrtExecutor

_log = logging.getLogger(__name__)

PROMPT_CHUNK = 256  # nodes of a prompt in a step where nobody else waits for its end


def load_model(bundle: Bundle, name: str, batch_size: int, threads: int) -> OrtExecutor:
    """The smallest compiled graph that holds `batch_size` sequences; raises BundleError."""
    graphs = bundle.manifest.models[name].graphs
    compiled = min(int(size) for size in graphs if int(size) >= batch_size)
    spec = spec_of(bundle.manifest, name)
    spec = replace(spec, max_nodes=max(spec.max_nodes, PROMPT_CHUNK))
    if threads > cores():
        _log.warning("%d threads on %d cores only wait for each other: give --threads %d", threads, cores(), cores())
    return OrtExecutor(GraphFile.of(bundle, graphs[str(compiled)]), spec, compiled, threads)
