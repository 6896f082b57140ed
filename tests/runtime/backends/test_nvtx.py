"""Ranges for a profiler: nothing while off, and one error without the package."""

import sys

import pytest

from specbuild.runtime.backends import nvtx
from specbuild.runtime.errors import OptionError


@pytest.fixture(autouse=True)
def off():
    yield
    nvtx.enabled = False


def test_on_it_is_the_package_s_range():
    package = pytest.importorskip("nvtx")
    with nvtx.range("round") as outer, nvtx.range("verify") as inner:
        assert outer is inner is None, "nothing while off"
    nvtx.enable()
    assert isinstance(nvtx.range("round"), package.annotate)


def test_without_the_package_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(OptionError, match="pip install nvtx"):
        nvtx.enable()
    assert not nvtx.enabled
