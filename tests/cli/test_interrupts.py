"""Signals become one interrupt, whatever it meets on its way; tests/attacks/test_signals.py has whole commands."""

import subprocess
import sys

import pytest

from specbuild.cli.interrupts import interrupted


def test_an_interrupt_is_found_behind_what_was_made_of_it():
    assert interrupted(KeyboardInterrupt())
    assert not interrupted(ValueError())
    assert not interrupted(None)
    made, dropped = ImportError("x"), ValueError()
    made.__cause__ = dropped.__context__ = KeyboardInterrupt()
    dropped.__suppress_context__ = True
    assert interrupted(made)
    assert interrupted(dropped)


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("name", "kind"), [("SIGINT", "KeyboardInterrupt"), ("SIGHUP", "Terminated")])
def test_one_that_was_caught_can_come_again_but_not_while_it_is_handled(name, kind):
    done = run(f"""
import signal
from specbuild.cli import interrupts
interrupts.raise_exceptions()
for _ in range(2):
    try:
        signal.raise_signal(signal.{name})
    except KeyboardInterrupt as error:
        signal.raise_signal(signal.SIGINT)
        print(type(error).__name__)
    interrupts.handled()
interrupts.ignore()
signal.raise_signal(signal.{name})
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{kind}\n" * 2, "")


@pytest.mark.slow
def test_one_that_ended_nothing_comes_again():
    """Closing a file in its destructor drops whatever is raised meanwhile, without a word."""
    done = run("""
import signal, time
from specbuild.cli import interrupts
interrupts.raise_exceptions()
for done in (False, True):
    try:
        signal.raise_signal(signal.SIGHUP)
    except KeyboardInterrupt:
        pass
    try:
        if done:
            interrupts.handled()
        time.sleep(1)
        print("left alone")
    except KeyboardInterrupt as error:
        print(type(error).__name__)
        interrupts.handled()
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Terminated\nleft alone\n", "")


def test_before_a_command_begins_a_signal_ends_the_process():
    done = run("""
import signal
from specbuild.cli import interrupts
interrupts.exit_at_once()
signal.raise_signal(signal.SIGTERM)
""")
    assert (done.returncode, done.stderr) == (1, "specbuild: interrupted: nothing half-done was left behind\n")


def test_errors_of_destructors_are_shown_as_ever_but_interrupts_are_not():
    done = run("""
from specbuild.cli import interrupts
interrupts.raise_exceptions()
class Bad:
    def __init__(self, error):
        self.error = error
    def __del__(self):
        raise self.error
Bad(ValueError("seen"))
Bad(KeyboardInterrupt("unseen"))
""")
    assert "ValueError: seen" in done.stderr
    assert "unseen" not in done.stderr
    assert done.returncode == 0
