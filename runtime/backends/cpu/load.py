"""Load a bundle's models on a CPU, and say what the bits of their logits depend on."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path

import onnxruntime

from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.backends.executor import spec_of
from specbuild.runtime.backends.onnx_graph import GraphFile
from specbuild.runtime.bundle.bundle import Bundle

from .cores import cores
from .executor import OrtExecutor

_log = logging.getLogger(__name__)

_CPUINFO = Path("/proc/cpuinfo")
_VECTOR_UNITS = ("amx", "avx", "fma", "sse4", "asimd", "sve", "sme", "i8mm", "bf16", "fphp")
PROMPT_CHUNK = 256  # nodes of a prefill chunk when only one sequence runs


def load_model(bundle: Bundle, name: str, batch_size: int, threads: int) -> OrtExecutor:
    """Load a model's smallest graph for at least `batch_size` sequences; raise BundleError if it does not load."""
    graph = next(iter(bundle.manifest.models[name].graphs.values()))
    spec = spec_of(bundle.manifest, name)
    spec = replace(spec, max_nodes=max(spec.max_nodes, PROMPT_CHUNK))
    if threads > cores():
        _log.warning("%d threads on %d cores only wait for each other: give --threads %d", threads, cores(), cores())
    return OrtExecutor(GraphFile.of(bundle, graph), spec, batch_size, threads)


def exactness_class() -> ExactnessClass:
    """Return the class of all steps on this machine: a node's bits depend on its own text alone.

    The digest is of what they depend on beside: processor's vector units, which ONNX Runtime's elementwise operators
    use, and its version.
    """
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    units = sorted(flag for flag in flags if flag.startswith(_VECTOR_UNITS))
    machine = json.dumps([onnxruntime.__version__, units])
    return ExactnessClass(1, 1, hashlib.sha256(machine.encode()).hexdigest())
