"""Everything that launches kernels can be used as everything else that does."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from specbuild.runtime.backends.gpu import load
from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.backends.kernels.cubins import CubinKernels
from specbuild.runtime.backends.kernels.interface import Kernels
from specbuild.runtime.decoding.device import description

METHODS = {name: each for name, each in vars(Kernels).items() if inspect.isfunction(each) and name[0] != "_"}


@pytest.mark.parametrize("kind", [KernelLibrary, CubinKernels, load._Current, description._Kernels])
def test_what_launches_has_the_interface(kind: Any) -> None:
    """The same methods, called with as many arguments."""
    assert METHODS.keys() == {"launch", "workspace", "splits"}
    for name, wanted in METHODS.items():
        given = [each for each in inspect.signature(getattr(kind, name)).parameters if each != "self"]
        assert len(given) == len(inspect.signature(wanted).parameters) - 1, (kind, name)
