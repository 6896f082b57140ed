"""Of a process that finds the stand-in card: what executes models on it is the stand-in's, however it is imported.

Nothing is imported here: a module is replaced, or changed, once somebody imports it.
"""

import importlib
import importlib.machinery
import sys
from pathlib import Path

SITE = str(Path(__file__).resolve().parent)
REPLACED = "tensorrt_rtx"  # by the package beside this file, wherever a real one lies in the path
CHANGED = {"onnxruntime": "card_onnxruntime", "specbuild.runtime.bundle.backend": "card_backends"}  # by `change` of


class _Changing:
    """A loader that executes a module and then lets the stand-in change it."""

    def __init__(self, loader, changer):
        self._loader, self._changer = loader, changer

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        importlib.import_module(self._changer).change(module)


class Finder:
    """Asked before all others; it answers for the modules above alone."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == REPLACED:
            return importlib.machinery.PathFinder.find_spec(name, [SITE])
        if name not in CHANGED:
            return None
        others = (finder for finder in sys.meta_path if finder is not Finder)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec and spec.loader:
            spec.loader = _Changing(spec.loader, CHANGED[name])
        return spec


sys.meta_path.insert(0, Finder)
