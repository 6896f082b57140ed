"""The runtime loads the plugin into the registry of a real TensorRT, the lean runtime's, once."""

import subprocess
import sys

import pytest

PROGRAM = """
import pathlib, sys
import tensorrt_lean as trt
from specbuild.runtime.backends import plan
registry = trt.get_plugin_registry()
before = len(registry.all_creators)
plan.find_library = lambda name: pathlib.Path(sys.argv[1])
plan.load_plugin(trt)
plan.find_library = lambda name: None  # what is there is not looked for
plan.load_plugin(trt)
print(len(registry.all_creators) - before, registry.get_creator("TreeAttention", "1", "specbuild").plugin_version)
"""


def test_a_library_is_loaded_once(harness, plugin_library):
    """In a process of its own: a registry is one a process, and other tests load the library as well."""
    lean = pytest.importorskip("tensorrt_lean", reason="needs tensorrt_lean (pip install tensorrt-lean-cu13)")
    major = str(harness.harness_major())
    if lean.__version__.split(".")[0] != major:
        pytest.skip(f"needs a tensorrt_lean of the headers' major version, {major}: this is {lean.__version__}")
    command = [sys.executable, "-c", PROGRAM, str(plugin_library)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == ["1", "1"]
