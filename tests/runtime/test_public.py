"""The runtime's public names are these, each the very thing that its module defines, and none is imported unasked."""

import importlib
import inspect
import subprocess
import sys

import pytest

import specbuild
from specbuild import runtime
from specbuild.runtime import public

NAMES = {
    name: value
    for name, value in vars(public).items()
    if not name.startswith("_") and name != "annotations" and not inspect.ismodule(value)
}


def test_the_names_are_these():
    """Taking one away breaks programs; each is said twice, for programs and for type checkers."""
    assert {name for name in dir(runtime) if name[0].isupper()} - {"Any", "TYPE_CHECKING"} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_what_its_module_defines(name):
    defined = NAMES[name]
    assert getattr(runtime, name) is defined
    if inspect.isclass(defined):
        assert getattr(importlib.import_module(defined.__module__), name) is defined
        assert defined.__doc__


@pytest.mark.parametrize("name", ["AsyncEngine", "Chat", "Engine", "Limits", "SamplingParams"])
def test_the_package_has_those_that_every_program_needs(name):
    assert getattr(specbuild, name) is getattr(public, name)
    assert name in dir(specbuild)


@pytest.mark.parametrize("name", ["Nothing", "engines", "__path_to__", "_private"])
def test_other_names_are_none(name):
    for module in (runtime, specbuild):
        with pytest.raises(AttributeError, match=name):
            getattr(module, name)


def test_nothing_is_imported_before_it_is_asked_for():
    code = """import sys
import specbuild, specbuild.runtime, specbuild.runtime.errors
loaded = {name for name in sys.modules if name.startswith("specbuild.")} | ({"numpy", "onnxruntime"} & {*sys.modules})
assert loaded == {"specbuild.runtime", "specbuild.runtime.errors"}, loaded
specbuild.SamplingParams
assert "specbuild.runtime.sampling.parameters" in sys.modules
assert "specbuild.runtime.engine" not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_engine_needs_no_asyncio():
    code = (
        "import sys; from specbuild import Engine; print('asyncio' in sys.modules, 'importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
