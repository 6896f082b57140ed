"""Models: which bundle has which name, and which one a request means."""

from __future__ import annotations

from pathlib import Path

import ended
import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve.admission import Admission
from specbuild.serve.errors import ApiError
from specbuild.serve.models import Models, ServedModel, names_of


def test_names() -> None:
    assert names_of(["a/pycode.bundle"], ()) == [(("pycode",), Path("a/pycode.bundle"))]
    assert names_of(["pycode.bundle"], ("x", "y")) == [(("x", "y"), Path("pycode.bundle"))]
    assert names_of(["a=x.bundle", "b=x.bundle"], ()) == [((name,), Path("x.bundle")) for name in "ab"]
    for bundles, served in (("x y/x", ""), ("a b", "c"), ("a", " "), ("a", "\n"), ("a", "b b")):
        with pytest.raises(OptionError):
            names_of(bundles.split(), tuple(served.split(" ")) if served else ())


def test_which_one_a_request_means() -> None:
    engine, admission = ended.served().engine, Admission(1, 1)
    one = Models([ServedModel(("a", "b"), Path("x"), engine, {}, admission)])
    assert [one.pick(name).name for name in (None, "a", "b")] == ["a", "a", "a"]
    with pytest.raises(ApiError) as refused:
        one.pick("c")
    assert (refused.value.status, refused.value.code, refused.value.param) == (404, "model_not_found", "model")
    two = ended.models("a", "b")
    assert two.pick("b").name == "b"
    with pytest.raises(ApiError, match="a, b"):
        two.pick(None)
