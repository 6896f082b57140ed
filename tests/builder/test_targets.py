"""Architectures are read as they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.targets import ARCHITECTURES, architectures, split_names
from specbuild.runtime.bundle.backend import COMPATIBLE
from specbuild.runtime.errors import OptionError


def test_architectures() -> None:
    assert architectures([]) == ()
    assert architectures(["90,89", "sm_90", " 121 "]) == ("90", "89", "121")
    assert architectures(["89", "all"]) == ARCHITECTURES
    assert BuildConfig("t", Path("b"), cuda_arch=("90,89",)).architectures == ("90", "89")


@pytest.mark.parametrize("name", ["75", "sm_70", "compute_80", "banana", "80;86", "8 0", "90a", "sm_100a"])
def test_an_unsupported_architecture_is_named(name: str) -> None:
    with pytest.raises(
        OptionError, match=f"^sm_{name.removeprefix('sm_')} is not supported: use 80, 86, .* 90, 100, .*, or all$"
    ):
        BuildConfig("t", Path("b"), cuda_arch=("80", name))


def test_an_empty_architecture() -> None:
    with pytest.raises(OptionError, match="an architecture is empty: use 80, 86"):
        architectures(["80,"])


def test_names_are_split_at_commas_and_between_options() -> None:
    known = ("80", "86", "90", "any")
    assert split_names(["90, 86", "sm_80"], known, "no {}") == ["90", "86", "80"]
    assert split_names(["90", "any"], known, "no {}") == ["90", "any"]
    assert split_names([], known, "no {}") == []
    with pytest.raises(OptionError, match=r"^no 75: use 80, 86, 90, or any$"):
        split_names(["80,75"], known, "no {}")


def test_a_compatible_build_has_one_architecture_of_each_kind() -> None:
    assert set(COMPATIBLE) < set(ARCHITECTURES)
    assert architectures([",".join(COMPATIBLE)]) == COMPATIBLE
