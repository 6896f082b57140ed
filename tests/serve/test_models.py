"""Models: which bundle has which name, and which one a request means."""

import ended
import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve.errors import ApiError
from specbuild.serve.request.models import names_of


def test_names():
    for bundles, served, found in (
        (["a/pycode.bundle"], (), "pycode a/pycode.bundle"),
        (["pycode.bundle"], ("x", "y"), "x y pycode.bundle"),
        (["a=x.bundle", "b=x.bundle"], (), "a x.bundle b x.bundle"),
    ):
        assert " ".join(f"{' '.join(names)} {path}" for names, path in names_of(bundles, served)) == found
    for bundles, served in (
        (["x", "y/x"], ()),
        (["a", "b"], ("c",)),
        *((["a"], (name, "b")) for name in ("", "\n", "b")),
    ):
        with pytest.raises(OptionError):
            names_of(bundles, served)


def test_which_one_a_request_means():
    two = ended.models("a", "b")
    assert two.pick("b").name == "b"
    for name, status in ((None, 400), ("c", 404)):
        with pytest.raises(ApiError, match="a, b") as refused:
            two.pick(name)
        assert (refused.value.status, refused.value.param) == (status, "model")
