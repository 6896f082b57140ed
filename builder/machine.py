"""Lists what this machine lacks to build for a backend, and to run its bundles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnxruntime

from specbuild.runtime.backends.cpu.operators import operators
from specbuild.runtime.backends.gpu.cuda import check_driver
from specbuild.runtime.backends.kernels.library import PLUGIN, find_library
from specbuild.runtime.bundle.backend import Backend
from specbuild.runtime.errors import SpecbuildError

from .codegen.nvrtc import check_compiler
from .codegen.tensorrt import flavour


def lacks_to_build(backend: Backend, architectures: Sequence[str] = ()) -> list[str]:
    """Return what is missing here to build for a backend, with kernels for these architectures."""
    checks: list[Callable[[], object]] = [] if backend.on_gpu else [operators]
    if backend.compiles:
        checks.append(lambda: flavour(backend.name))
    if not backend.compiles_here:
        checks.append(check_driver)
    if architectures:
        checks.append(lambda: check_compiler(architectures))
    return _faults(checks)


def lacks_to_run(backend: Backend, plugin: bool = True) -> list[str]:
    """Return what is missing here to run a backend's bundles, those with TreeAttention in an engine if `plugin`."""
    if not backend.on_gpu:
        return _faults([operators])
    found = _faults([lambda: flavour(backend.name)] if backend.compiles else [])
    found += _faults([check_driver])
    if backend.provider not in (None, *onnxruntime.get_available_providers()):
        found.append("ONNX Runtime has no CUDA here: pip install onnxruntime-gpu")
    if plugin and backend.takes_plugins and backend.compiles and not find_library(PLUGIN):
        found.append("the plugin's library is missing (plugins/README.md), all but --attention native needs it")
    return found


def _faults(checks: Sequence[Callable[[], object]]) -> list[str]:
    found = []
    for check in checks:
        try:
            check()
        except SpecbuildError as error:
            found.append(str(error))
    return found
