"""Models: which bundle has which name, and which one a request means."""

from __future__ import annotations

from typing import Any

import ended
import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve.errors import ApiError
from specbuild.serve.models import names_of


@pytest.mark.parametrize(
    ("bundles", "served", "found"),
    [
        (["a/pycode.bundle"], (), [(("pycode",), "a/pycode.bundle")]),
        (["pycode.bundle"], ("x", "y"), [(("x", "y"), "pycode.bundle")]),
        (["a=x.bundle", "b=x.bundle"], (), [(("a",), "x.bundle"), (("b",), "x.bundle")]),
        *((["x", "y/x"], (), None), (["a", "b"], ("c",), None)),
        *((["a"], served, None) for served in (("", ""), ("\n",), ("b", "b"))),
    ],
)
def test_names(bundles: list[str], served: tuple[str, ...], found: list[Any] | None) -> None:
    if found is None:
        with pytest.raises(OptionError):
            names_of(bundles, served)
    else:
        assert [(names, str(path)) for names, path in names_of(bundles, served)] == found


def test_which_one_a_request_means() -> None:
    two = ended.models("a", "b")
    assert two.pick("b").name == "b"
    for name, status in ((None, 400), ("c", 404)):
        with pytest.raises(ApiError, match="a, b") as refused:
            two.pick(name)
        assert (refused.value.status, refused.value.param) == (status, "model")
