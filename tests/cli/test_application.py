"""However a command ends, that is an exit status and one line at most."""

import errno
import os
import subprocess
import sys

import pytest

from specbuild.cli import doctor
from specbuild.runtime.errors import ExecutionError, OptionError

INTERRUPTED = ImportError("what a library made of the interrupt")
INTERRUPTED.__cause__ = KeyboardInterrupt()
ENDS = [
    (INTERRUPTED, 1, "interrupted: nothing half-done was left behind"),
    (ExecutionError("it failed"), 1, "it failed"),
    (OptionError("no\nsuch  thing"), 2, "no such thing"),
    (KeyboardInterrupt(), 1, "interrupted: nothing half-done was left behind"),
    (EOFError(), 1, "interrupted: nothing half-done was left behind"),
    (MemoryError(), 1, "out of memory"),
    (ImportError("libx.so: failed to map segment from shared object"), 1, "out of memory"),
    (RuntimeError("std::bad_alloc"), 1, "out of memory"),
    (ModuleNotFoundError("x", name="torch"), 2, "this needs torch, which is not installed"),
    (OSError(errno.ENOSPC, "No space left on device", "/a/file"), 1, "/a/file: No space left on device"),
    (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 9), 2, "xxxxxxxxx: File name too long"),
    (OSError("nameless"), 1, "the system: nameless"),
    (ZeroDivisionError("by zero"), 1, "a bug in specbuild, ZeroDivisionError: by zero"),
]


@pytest.mark.parametrize(("error", "status", "told"), ENDS, ids=lambda each: type(each).__name__)
def test_an_error_is_one_line(specbuild, monkeypatch, error, status, told):
    def fail():
        raise error

    monkeypatch.setattr(doctor, "examine", fail)
    outcome = specbuild("doctor")
    assert (outcome.status, outcome.out) == (status, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith(f"specbuild: {told}")


def test_no_command_shows_the_help_as_it_is(specbuild):
    outcome = specbuild()
    assert (outcome.status, outcome.out + outcome.err) == (2, specbuild("--help").out)
    assert specbuild("--version").out.startswith("specbuild")


def test_a_warning_is_told_once_and_on_one_line(specbuild, monkeypatch):
    import logging

    def warn():
        for _ in range(2):
            logging.getLogger("specbuild.anything").warning("take\ncare")
        return {}

    monkeypatch.setattr(doctor, "examine", warn)
    assert specbuild("doctor").err == "specbuild: take care\n"


@pytest.mark.slow
def test_a_shell_completes_commands_and_flags(tmp_path):
    """As docs/reference/commands.md says."""
    for words, found in (
        *(("specbuild gen", "generate"), ("specbuild generate --draft-m", "--draft-max")),
        ("specbuild nonesuch gen", "generate"),
    ):
        told = {"_SPECBUILD_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        command = [sys.executable, "-c", "from specbuild.cli import main; main()"]
        done = subprocess.run(command, env=os.environ | told, capture_output=True, text=True, cwd=tmp_path)
        assert f"plain,{found}" in done.stdout.splitlines()
