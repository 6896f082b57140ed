"""Every public class, method and function says in its docstring what each of its parameters is."""

import dataclasses
import inspect
import re
import subprocess
import sys
import textwrap

import pytest

import specbuild
from specbuild import runtime

PUBLIC = {name: getattr(where, name) for where in (specbuild, runtime) for name in dir(where) if name[0] != "_"}
CLASSES = {
    name: each for name, each in PUBLIC.items() if inspect.isclass(each) and each.__module__.startswith("specbuild.")
}


def methods():
    for name, each in CLASSES.items():
        for key, value in inspect.getmembers(each):
            called = value.__func__ if inspect.ismethod(value) else value
            if not key.startswith("_") and inspect.isfunction(called) and called.__module__.startswith("specbuild."):
                yield pytest.param(called, id=f"{name}.{key}")


def parameters(function):
    names = list(inspect.signature(function).parameters)
    return [name for name in names if name not in ("self", "cls")]


def told(docstring, name):
    """Whether a parameter has a line of its own, or stands in backquotes in a sentence."""
    return bool(re.search(rf"^ *\*{{0,2}}{name}: |`{name}`", docstring, re.MULTILINE))


@pytest.mark.parametrize("method", list(methods()))
def test_a_method_says_what_its_parameters_are(method):
    docstring = inspect.getdoc(method) or ""
    assert docstring
    assert [name for name in parameters(method) if not told(docstring, name)] == []


@pytest.mark.parametrize("name", [name for name, each in CLASSES.items() if dataclasses.is_dataclass(each)])
def test_a_record_says_what_its_fields_are(name):
    each = CLASSES[name]
    source, docstring = inspect.getsource(each), inspect.getdoc(each) or ""
    for field in dataclasses.fields(each):
        if field.name.startswith("_") or not field.repr:
            continue
        beside = re.search(rf"^    {field.name}: .*# ", source, re.MULTILINE)
        assert told(docstring, field.name) or beside, f"{name}.{field.name}"


def examples():
    """The indented block behind `Example:`, by class."""
    found = {}
    for name, each in CLASSES.items():
        _, section, rest = (inspect.getdoc(each) or "").partition("Example:\n")
        if section:
            block = re.match(r"((?: {4}.*)?\n)*(?: {4}.*)?", rest)
            found[name] = textwrap.dedent(block[0] if block else "")
    return found


def test_those_that_every_program_needs_have_an_example():
    assert {"Engine", "AsyncEngine", "SamplingParams"} <= set(examples())


@pytest.mark.slow
@pytest.mark.parametrize("name", examples())
def test_an_example_runs(name, bundle, tmp_path):
    (tmp_path / "pycode.bundle").symlink_to(bundle)
    done = subprocess.run([sys.executable, "-c", examples()[name]], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
