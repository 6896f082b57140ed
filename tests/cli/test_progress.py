"""What goes on is shown on standard error: a bar on a terminal alone, and a note of turns that are not run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from rich.progress import MofNCompleteColumn

from specbuild.cli.progress import bar, tell_later_turns
from specbuild.runtime import SamplingParams
from specbuild.runtime.requests.prompt_file import Request


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Standard error is a terminal, as wide as it needs to be; what is called gives what it shows."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    ours, theirs = os.openpty()
    kept = os.dup(2)
    os.dup2(theirs, 2)
    try:
        yield lambda: os.read(ours, 1 << 16).decode()
    finally:
        os.dup2(kept, 2)
        for descriptor in (ours, theirs, kept):
            os.close(descriptor)


def test_a_terminal_shows_what_goes_on_and_how_far_it_is(terminal: Callable[[], str]) -> None:
    with bar(MofNCompleteColumn()) as (progress, task):
        progress.update(task, description="lowering target", total=7, completed=3)
        progress.refresh()
        shown = terminal()
    assert "loading torch" in shown.replace("\x1b[0m", "") or "lowering target" in shown
    assert "3/7" in shown
    assert "0:00:00" in shown


def test_noise_on_standard_error_does_not_take_the_bar_away(terminal: Callable[[], str]) -> None:
    """A compiler's is sent elsewhere while it runs; the bar has the terminal to itself."""
    with bar() as (progress, task):
        silent = os.open(os.devnull, os.O_WRONLY)
        before = os.dup(2)
        os.dup2(silent, 2)
        try:
            os.write(2, b"warning: unused variable")
            progress.update(task, description="compiling sm_90")
            progress.refresh()
        finally:
            os.dup2(before, 2)
            os.close(before)
            os.close(silent)
        shown = terminal()
    assert "compiling sm_90" in shown
    assert "warning" not in shown


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
