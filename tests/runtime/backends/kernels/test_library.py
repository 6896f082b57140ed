"""Where the compiled kernels' library is looked for."""

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from specbuild.runtime.backends.kernels import library


@pytest.mark.parametrize("name", [library.LIBRARY, library.PLUGIN])
def test_the_installations_library(tmp_path, monkeypatch, name):
    monkeypatch.setattr(library, "distribution", lambda _: SimpleNamespace(locate_file=tmp_path.joinpath))
    assert library.find_library(name) is None
    path = tmp_path / "specbuild" / "runtime" / "lib" / name
    path.parent.mkdir(parents=True)
    path.touch()
    assert library.find_library(name) == path
    assert (library.find_library() == path) == (name == "libspecbuild_kernels.so")


def test_sources_that_were_never_installed(monkeypatch):
    def missing(_):
        raise PackageNotFoundError

    monkeypatch.setattr(library, "distribution", missing)
    assert library.find_library() is None
