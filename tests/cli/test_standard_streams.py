"""Output that is lost is noticed once; tests/attacks/test_cli.py has pipes, full disks and closed streams."""

import errno
import io
import os
import sys
from pathlib import Path

import pytest
from command_line import redirected

from specbuild.cli.standard_streams import lost, prepare, tell


@pytest.fixture(autouse=True)
def _streams(monkeypatch):
    """They are replaced here, and put back."""
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EPIPE])
def test_a_failure_is_raised_once_and_remembered(failure):
    ours, theirs = os.pipe()
    os.close(ours)
    with Path("/dev/full").open("w") as full:
        where = theirs if failure == errno.EPIPE else full.fileno()
        with redirected(1, where), redirected(2, where):
            prepare()
            tell("that nobody reads this is no failure")
            with pytest.raises(OSError, match=os.strerror(failure)):
                print("and this is one", flush=True)
            print("more", flush=True)
            found = lost()
            assert found
            assert found.errno == failure
            sys.stdout = io.StringIO()  # another program's
            assert lost() is None
    os.close(theirs)


def test_output_goes_where_it_went_whatever_its_characters(capfd):
    prepare()
    print("ä\udcff")
    tell("one\n  line\udcff")
    assert lost() is None
    assert capfd.readouterr() == ("ä\\udcff\n", "specbuild: one line\\udcff\n")
