"""Architectures are read as they are written."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.targets import ARCHITECTURES, architectures
from specbuild.runtime.errors import OptionError


def test_architectures():
    assert architectures([]) == ()
    assert architectures(["90,89", "sm_90", " 121 "]) == ("90", "89", "121")
    assert architectures(["89", "all"]) == ARCHITECTURES
    assert BuildConfig("t", Path("b"), cuda_arch=("90,89",)).architectures == ("90", "89")


def test_capabilities_and_cards_are_architectures(monkeypatch):
    assert architectures(["8.9", "12.0", "10.0"]) == ("89", "120", "100")
    assert architectures(["rtx4090, NVIDIA GeForce RTX 5070 Ti", "H100", "l40s,a10"]) == ("89", "120", "90", "86")
    monkeypatch.setattr("specbuild.builder.targets.Cuda", lambda: SimpleNamespace(capability="86", close=lambda: None))
    assert architectures(["native"]) == ("86",)
    with pytest.raises(OptionError, match="sm_75 is not supported"):
        architectures(["t4"])


@pytest.mark.parametrize("name", ["75", "sm_70", "compute_80", "banana", "80;86", "8 0", "90a", "sm_100a", ""])
def test_an_unsupported_architecture_is_named(name):
    told = f"sm_{name.removeprefix('sm_')} is not supported" if name else "an architecture is empty"
    with pytest.raises(OptionError, match=f"^{told}: use 80, 86, .* 90, 100, .*all$"):
        BuildConfig("t", Path("b"), cuda_arch=("80", name))
