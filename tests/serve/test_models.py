"""Models: which bundle has which name, and which one a request means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve.admission import Admission
from specbuild.serve.errors import ApiError
from specbuild.serve.models import Models, ServedModel, names_of


def model(*names: str) -> ServedModel:
    engine: Any = None
    return ServedModel(names, Path("x"), engine, {}, Admission(1, 1))


def test_names() -> None:
    assert names_of(["a/pycode.bundle"], ()) == [(("pycode",), Path("a/pycode.bundle"))]
    assert names_of(["pycode.bundle"], ("x", "y")) == [(("x", "y"), Path("pycode.bundle"))]
    assert names_of(["a=x.bundle", "b=x.bundle"], ()) == [(("a",), Path("x.bundle")), (("b",), Path("x.bundle"))]


@pytest.mark.parametrize(
    ("bundles", "served"),
    [(["x.bundle", "y/x.bundle"], ()), (["a", "b"], ("c",)), (["a"], ("",)), (["a"], ("\n",)), (["a"], ("b", "b"))],
)
def test_names_that_are_none(bundles: list[str], served: tuple[str, ...]) -> None:
    with pytest.raises(OptionError):
        names_of(bundles, served)


def test_one_model_answers_without_a_name_and_to_each_of_its_own() -> None:
    one = Models([model("a", "b")])
    assert [one.pick(name).name for name in (None, "a", "b")] == ["a", "a", "a"]
    with pytest.raises(ApiError) as refused:
        one.pick("c")
    assert (refused.value.status, refused.value.code, refused.value.param) == (404, "model_not_found", "model")


def test_of_several_models_one_is_named() -> None:
    two = Models([model("a"), model("b")])
    assert two.pick("b").name == "b"
    with pytest.raises(ApiError, match="a, b"):
        two.pick(None)
