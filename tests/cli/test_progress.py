"""What goes on is shown on standard error: a bar on a terminal alone, and a note of turns that are not run."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.progress import MofNCompleteColumn

from specbuild.cli.progress import bar, tell_later_turns
from specbuild.runtime import SamplingParams
from specbuild.runtime.requests.prompt_file import Request


@contextmanager
def standard_error(descriptor: int) -> Iterator[None]:
    """Standard error is another file while this lasts."""
    before = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Callable[[str], str]]]:
    """A terminal, and what it has shown when some words are there; a terminal's bytes come when the system likes."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    ours, theirs = os.openpty()

    def shown(words: str) -> str:
        found = ""
        while words not in found:
            assert select.select([ours], [], [], 10)[0], f"no {words!r} in {found!r}"
            found += os.read(ours, 1 << 16).decode()
        return found

    yield theirs, shown
    os.close(theirs)
    os.close(ours)


def test_a_terminal_shows_what_goes_on_and_how_far_it_is(terminal: tuple[int, Callable[[str], str]]) -> None:
    there, shown = terminal
    with standard_error(there), bar(MofNCompleteColumn()) as (progress, task):
        assert "0/?" in shown("0:00:0"), "the end is not known yet"
        progress.update(task, description="lowering target", total=7, completed=3)
        progress.refresh()
        assert "lowering target" in shown("3/7")


def test_noise_on_standard_error_does_not_take_the_bar_away(terminal: tuple[int, Callable[[str], str]]) -> None:
    """A compiler's is sent elsewhere while it runs; the bar has a way to the terminal of its own."""
    there, shown = terminal
    with standard_error(there), bar() as (progress, task):
        with Path(os.devnull).open("w") as silence, standard_error(silence.fileno()):
            os.write(2, b"warning: unused variable")
            progress.update(task, description="compiling sm_90")
            progress.refresh()
        assert "warning" not in shown("compiling sm_90")


def test_what_is_no_terminal_gets_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with bar(MofNCompleteColumn()) as (progress, task):
        progress.update(task, description="lowering target", total=7, completed=3)
        progress.refresh()
        assert progress.tasks[0].completed == 3
    assert capfd.readouterr() == ("", "")


def test_turns_that_are_not_run_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    def requests(*later: int) -> list[Request]:
        return [Request("x", SamplingParams(), turns) for turns in later]

    tell_later_turns(requests(0, 2, 1))
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err == "specbuild: only the first of each line's turns is run; 3 later turns are not\n"
    tell_later_turns(requests(0, 0))
    tell_later_turns([])
    assert capsys.readouterr() == ("", "")
