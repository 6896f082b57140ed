"""Output that is lost is noticed once; tests/attacks/test_cli.py has pipes, full disks and closed streams."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from specbuild.cli.standard_streams import _Output, lost, prepare, tell


def test_a_failure_is_raised_once_and_remembered() -> None:
    with Path("/dev/full").open("w") as full:
        output = _Output(full.fileno(), raises=True)
        with pytest.raises(OSError, match="No space left"):
            output.write(b"x")
        assert output.lost
        assert output.write(b"more") == 4
        quiet = _Output(full.fileno(), raises=False)
        assert quiet.write(b"x") == 1
        assert quiet.lost


def test_output_goes_where_it_went_whatever_its_characters(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    prepare()
    print("ä\udcff")
    tell("one\n  line\udcff")
    assert lost() is None
    assert capfd.readouterr() == ("ä\\udcff\n", "specbuild: one line\\udcff\n")


def test_what_is_buffered_is_written_out_and_its_loss_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(_Output(theirs, raises=True))))
    print("nobody reads this")
    assert isinstance(lost(), BrokenPipeError)
    assert isinstance(lost(), BrokenPipeError)
    os.close(theirs)


def test_another_programs_stream_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert lost() is None
