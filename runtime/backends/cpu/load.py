"""Load a bundle's models on a CPU, and keep the target to the exactness class that the build found there."""

from __future__ import annotations

import logging
from dataclasses import replace

from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.backends.executor import spec_of
from specbuild.runtime.backends.onnx_graph import GraphFile
from specbuild.runtime.bundle.bundle import Bundle

from .cores import cores
from .exactness import find, machine_of
from .executor import OrtExecutor

_log = logging.getLogger(__name__)

PROMPT_CHUNK = 256  # nodes of a prefill chunk when only one sequence runs


def load_model(bundle: Bundle, name: str, batch_size: int, threads: int) -> OrtExecutor:
    """Load a model's smallest graph for at least `batch_size` sequences; raise BundleError if it does not load."""
    graphs = bundle.manifest.models[name].graphs
    compiled = min(int(size) for size in graphs if int(size) >= batch_size)
    spec = spec_of(bundle.manifest, name)
    spec = replace(spec, max_nodes=max(spec.max_nodes, PROMPT_CHUNK))
    if threads > cores():
        _log.warning("%d threads on %d cores only wait for each other: give --threads %d", threads, cores(), cores())
    return OrtExecutor(GraphFile.of(bundle, graphs[str(compiled)]), spec, compiled, threads)


def keep_to_class(bundle: Bundle, target: OrtExecutor) -> ExactnessClass | None:
    """Keep the target's steps to an exactness class and return it; warn and return None if there is none.

    It is the class that the build found on a machine like this one, else one found now.
    """
    for record in bundle.manifest.exactness:
        if record.machine == machine_of(target) and (record.digest or not record.rows):
            found = ExactnessClass(record.rows, record.sequence_rows, record.digest) if record.rows else None
            target.keep_to(found)
            break
    else:
        found = find(target)
    if not found:
        bound = bundle.manifest.exactness_bound
        _log.warning("steps of no shapes agree in every bit here: choices closer than %.2g may be others", bound)
    return target.exactness
