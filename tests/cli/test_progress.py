"""What goes on is shown on standard error: a bar on a terminal alone, elsewhere a line now and then."""

import os
import select
import threading
from pathlib import Path

import pytest
from command_line import redirected

from specbuild.cli.progress import Progress, showing


@pytest.fixture
def terminal(monkeypatch):
    """A terminal, and what it has shown when some words are there; a terminal's bytes come when the system likes."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    ours, theirs = os.openpty()

    def shown(words):
        found = ""
        while words not in found:
            assert select.select([ours], [], [], 10)[0], f"no {words!r} in {found!r}"
            found += os.read(ours, 1 << 16).decode()
        return found

    yield theirs, shown
    os.close(theirs)
    os.close(ours)


def test_a_terminal_shows_what_goes_on_and_how_far_it_is(terminal):
    there, see = terminal
    with redirected(2, there), showing("build", quiet=False) as progress:
        assert "0/?" in see("0:00:0"), "the end is not known yet"
        progress.begin("lowering target", 7, "stages")
        progress.update(3, note="layers 20%")
        assert "lowering target: layers 20%" in see("3/7")


def test_noise_on_standard_error_does_not_take_the_bar_away(terminal):
    """A compiler's is sent elsewhere while it runs; the bar has a way to the terminal of its own."""
    there, see = terminal
    with redirected(2, there), showing("build", quiet=False) as progress:
        with Path(os.devnull).open("w") as silence, redirected(2, silence.fileno()):
            os.write(2, b"warning: unused variable")
            progress.begin("compiling sm_90")
            found = see("compiling sm_90")
        assert "warning" not in found


def test_what_is_printed_to_a_file_stays_there_while_a_terminal_shows_a_bar(terminal, capfd):
    there, _ = terminal
    with redirected(2, there), showing("verify", quiet=False):
        print("equal")
    assert capfd.readouterr().out == "equal\n"


@pytest.mark.parametrize("quiet", [False, True])
def test_no_descriptor_and_no_thread_stays(quiet, capfd):
    threads = set(threading.enumerate())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with showing("build", quiet):
            pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert threads >= set(threading.enumerate())  # those of other tests may end meanwhile
    assert capfd.readouterr() == ("", "")


def test_a_line_says_what_is_done_and_what_is_left():
    now = 0.0
    progress = Progress("distill", lambda: now)
    now = 12
    assert progress.line() == "distill, starting: 12 s so far"
    progress.begin("training", 2000, "steps", done=300)  # of an earlier run, which say nothing of this one's speed
    now = 16
    assert progress.line() == "distill, training: 300 of 2000 steps, 4 s so far"
    progress.update(320, note="loss 1.5")
    assert progress.line() == "distill, training (loss 1.5): 320 of 2000 steps, about 6 min left"
    progress.update(2000)
    assert progress.line() == "distill, training: 2000 of 2000 steps, 4 s so far"
    progress.begin("", 11, "stages")
    progress.update(2.5, "exporting target", note="layers 50%")
    now += 5 * 3600
    assert progress.line() == "distill, exporting target (layers 50%): 2 of 11 stages, about 17.0 h left"
    for done in (0, 1):  # what is told by name is counted anew under another one
        progress.tell("texts", done, 6)
        now += 10
    assert progress.line() == "distill, texts: 1 of 6, about 2 min left"


def test_what_is_no_terminal_gets_a_line_every_interval(capfd):
    told = threading.Event()

    def clock():
        if threading.current_thread() is not threading.main_thread():  # each line asks for the time
            told.set()
        return 0.0

    with showing("pair", quiet=False, interval=1e-3, clock=clock) as progress:
        progress.begin("texts", 6, "prompts")
        for _ in range(2):  # one may have been begun before
            told.clear()
            assert told.wait(10)
    lines = capfd.readouterr().err.splitlines()
    assert "specbuild: pair, texts: 0 of 6 prompts, 0 s so far" in lines


def test_a_reader_of_lines_that_goes_does_not_stop_the_command():
    ours, theirs = os.pipe()
    os.close(ours)
    with redirected(2, theirs), showing("pair", quiet=False, interval=1e-3):
        for thread in threading.enumerate():
            if thread.name == "specbuild-progress":
                thread.join(10)
                assert not thread.is_alive(), "it goes on writing"
    os.close(theirs)
