"""Errors are the tree that their module draws, each with the exit status of its branch, each a single line."""

import inspect
import re

import pytest

import specbuild
from specbuild.runtime import errors
from specbuild.runtime.errors import InputError, SpecbuildError, one_line, shown

KINDS = {kind for _, kind in inspect.getmembers(errors, inspect.isclass)}


def drawn():
    """The parent of each error in the docstring's drawing."""
    parents, above = dict[str, str](), list[tuple[int, str]]()
    for match in re.finditer(r"^([ │├└─]*)(\w+Error)\b", errors.__doc__ or "", re.MULTILINE):
        depth, name = len(match[1]), match[2]
        above = [(at, parent) for at, parent in above if at < depth]
        parents[name] = above[-1][1] if above else "Exception"
        above.append((depth, name))
    return parents


def test_the_drawing_is_the_tree():
    assert {kind.__name__: kind.__base__.__name__ for kind in KINDS} == drawn()


@pytest.mark.parametrize("kind", sorted(KINDS, key=lambda kind: kind.__name__))
def test_whose_fault_it_is_decides_the_exit_status(kind):
    assert issubclass(kind, SpecbuildError)
    assert kind.exit_status == (2 if issubclass(kind, InputError) else 1)
    assert str(kind("what is wrong: what to do")) == "what is wrong: what to do"


@pytest.mark.parametrize("kind", sorted(KINDS, key=lambda kind: kind.__name__))
def test_the_package_has_every_error(kind):
    assert getattr(specbuild, kind.__name__) is kind
    assert kind.__doc__


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("it is too long"), "it is too long"),
        (ValueError("it is\n  too\tlong "), "it is too long"),
        (ValueError("the first paragraph\nends here\n\nthe second one is not told"), "the first paragraph ends here"),
        (KeyError("name"), "KeyError 'name'"),
        (ValueError("token"), "ValueError token"),
        (ValueError(""), "ValueError"),
        (RuntimeError(), "RuntimeError"),
        (OSError(2, "No such file or directory"), "[Errno 2] No such file or directory"),
    ],
)
def test_another_library_s_error_is_told_in_one_line(error, line):
    assert one_line(error) == line


def test_a_message_that_begins_with_an_empty_line_leaves_the_kind():
    assert one_line(ValueError("\n\nwhat comes after an empty line is not told")) == "ValueError"


def test_a_message_is_one_line_and_not_too_long():
    """Whatever a file or a caller put into it."""
    text = str(SpecbuildError("a field\n  named\ra\x0bb " + "x" * 10**7))
    assert text.startswith("a field named a b xxx")
    assert text.endswith("…")
    assert len(text) == errors.MAX_LINE


def test_a_value_is_told_in_a_few_words_or_by_its_kind():
    assert shown(("a", 1)) == "('a', 1)"
    assert len(shown("a" * 10**7)) <= errors.MAX_SHOWN
    assert shown(10**5000) == "<int>"
