"""Whatever the library raises is an error of ours in one line, but for what ends a process."""

import pytest

from specbuild.runtime.errors import BundleError
from specbuild.runtime.requests.library import call


class Panic(BaseException):
    """As a panic of Rust code arrives: no Exception."""


def raiser(error):
    raise error


@pytest.mark.parametrize("error", [ValueError("bad\nline"), Panic()])
def test_what_is_raised_is_ours(error):
    with pytest.raises(BundleError, match=r"^no tokenizer: (bad line|Panic)$") as caught:
        call(BundleError, "no tokenizer", raiser, error)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_the_process_ends_it(error):
    with pytest.raises(type(error)):
        call(BundleError, "x", raiser, error)
