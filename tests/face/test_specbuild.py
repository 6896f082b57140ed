"""The names of `specbuild` itself: all are there, and none costs anything before it is used."""

import subprocess
import sys
from pathlib import Path

import pytest

import specbuild
from specbuild import runtime
from specbuild.runtime import errors

ROOT = Path(__file__).resolve().parents[2]
LAZY = ("AsyncEngine", "Chat", "Engine", "Limits", "SamplingParams", "StructuredOutputs")


def python(code, folder):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", LAZY)
def test_a_name_is_the_runtimes(name):
    assert getattr(specbuild, name) is getattr(runtime, name)
    assert name in dir(specbuild)


def test_every_error_is_there():
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert kinds == {getattr(specbuild, kind.__name__) for kind in kinds}


def test_what_is_not_there_is_an_attribute_error():
    for module in (specbuild, runtime):
        with pytest.raises(AttributeError, match="nothing"):
            module.nothing  # noqa: B018


@pytest.mark.parametrize("folder", [ROOT, ROOT / "tests"], ids=["in the repository", "elsewhere"])
def test_nothing_is_imported_before_it_is_used(folder):
    """Also where the repository's own folders stand in the way of the installed package."""
    code = (
        "import sys, specbuild; print(specbuild.__version__, [m for m in ('numpy', 'onnxruntime') if m in sys.modules])"
    )
    version, _, loaded = python(code, folder).strip().partition(" ")
    assert version[0].isdigit()
    assert loaded == "[]"


def test_old_deep_imports_go_on():
    code = "from specbuild.runtime.aio import AsyncEngine as old; import specbuild; print(old is specbuild.AsyncEngine)"
    assert python(code, ROOT) == "True\n"
