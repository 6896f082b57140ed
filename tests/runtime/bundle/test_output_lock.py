"""One writer of an output; what killed ones left is gone or back, and what comes in the meantime stays."""

import errno
import fcntl
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from specbuild.runtime.bundle.atomic_output import check_output, staging
from specbuild.runtime.errors import OutputError

WRITER = """
import sys, time
from pathlib import Path
from specbuild.runtime.bundle import atomic_output
output, where = Path(sys.argv[1]), sys.argv[2]

def wait(*_):
    print("there", flush=True)
    time.sleep(60)

if where == "replacing":
    rename = Path.rename
    Path.rename = lambda *names: (rename(*names), wait())
with atomic_output.staging(output, 1) as folder:
    (folder / "manifest.json").write_text("new")
    if where == "writing":
        wait()
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def start(output, where):
    """A writer that has come as far as it is asked to."""
    found = subprocess.Popen([sys.executable, "-c", WRITER, str(output), where], stdout=subprocess.PIPE, text=True)
    assert found.stdout
    assert found.stdout.readline() == "there\n"
    return found


def kill(writer):
    writer.send_signal(signal.SIGKILL)
    writer.wait()


def test_a_rename_that_fails_brings_the_older_folder_back(tmp_path, monkeypatch):
    """Another process puts a folder where the older one was, before the new one comes."""
    output, rename = tmp_path / "x.bundle", Path.rename
    output.mkdir()
    (output / "manifest.json").write_text("old")

    def interfere(path, to):
        rename(path, to)
        if path == output:
            output.mkdir()

    monkeypatch.setattr(Path, "rename", interfere)
    with pytest.raises(OutputError, match=r"x\.bundle cannot be written \(File exists\)"), staging(output, 1) as folder:
        (folder / "manifest.json").write_text("new")
    assert names(tmp_path) == ["x.bundle"]
    assert (output / "manifest.json").read_text() == "old"


@pytest.mark.parametrize("checked", [True, False])
def test_a_folder_that_came_in_the_meantime_stays(tmp_path, monkeypatch, checked):
    """An empty one too, whether it is found by the second look or, a moment after it, by the rename itself."""
    output, exists = tmp_path / "x.bundle", Path.exists
    check = (lambda: check_output(output, force=False)) if checked else (lambda: None)

    def write():
        with staging(output, 1, check) as folder:
            (folder / "manifest.json").write_text("mine")
            output.mkdir()
            if not checked:
                monkeypatch.setattr(Path, "exists", lambda path: path != output and exists(path))

    with pytest.raises(OutputError, match=r"x\.bundle (exists: give --force|cannot be written \(File exists\))"):
        write()
    assert names(tmp_path) == ["x.bundle"]
    assert names(output) == []


def test_of_two_writers_the_second_is_told_who_the_first_is(tmp_path):
    output = tmp_path / "x.bundle"
    writer = start(output, "writing")
    try:
        line = rf"x\.bundle is being written by process {writer.pid} on .*: wait for it, or give another --output"
        with pytest.raises(OutputError, match=line), staging(output, 1):
            pass
        with staging(tmp_path / "y.bundle", 1):  # of another output
            pass
    finally:
        kill(writer)
    with staging(output, 1) as folder:
        (folder / "manifest.json").write_text("mine")
    assert names(tmp_path) == ["x.bundle", "y.bundle"], "what the killed one left is gone, and so is its lock"


def test_what_a_killed_writer_had_moved_aside_is_back(tmp_path):
    output = tmp_path / "x.bundle"
    output.mkdir()
    (output / "manifest.json").write_text("old")
    kill(start(output, "replacing"))
    assert not output.exists()
    refused = pytest.raises(OutputError, match="exists: give --force")
    with refused, staging(output, 1, lambda: check_output(output, force=False)):
        raise AssertionError
    assert names(tmp_path) == ["x.bundle"]
    assert (output / "manifest.json").read_text() == "old"


def test_only_what_belongs_to_the_output_goes(tmp_path):
    """Folders of a killed writer, and what lies beside the new one; not what only looks alike."""
    others = [
        ".x.bundle.training",
        ".x.bundle.new-abc",
        ".y.bundle.new-abcdefgh",
        ".xxbundle.old-abcdefgh",
        "x.bundle.old",
    ]
    for name in (*others, ".x.bundle.new-abcdefgh", ".x.bundle.new-abcdefgh.rtx-cache"):
        (tmp_path / name).mkdir()
    with staging(tmp_path / "x.bundle", 1) as folder:
        folder.with_name(f"{folder.name}.rtx-cache").mkdir()
    assert names(tmp_path) == sorted([*others, "x.bundle"])


def test_a_lock_that_its_last_holder_removed_is_made_again(tmp_path, monkeypatch):
    """Between the opening of its file and the locking."""
    output, lock = tmp_path / "x.bundle", fcntl.flock
    gone = list[str]()

    def removed(file, how):
        if not gone:
            gone.extend(names(tmp_path))
            (tmp_path / gone[0]).unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", removed)
    refused = pytest.raises(OutputError, match="is being written by process")
    with staging(output, 1), refused, staging(output, 1):
        raise AssertionError
    assert (len(gone), names(tmp_path)) == (1, ["x.bundle"])


@pytest.mark.parametrize(("fault", "works"), [(errno.ENOLCK, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_a_file_system_without_locks_is_written_without_one(tmp_path, monkeypatch, fault, works):
    def refuse(*_):
        raise OSError(fault, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with nullcontext() if works else pytest.raises(OutputError, match="cannot be written"), staging(tmp_path / "x", 1):
        pass
    assert ("x" in names(tmp_path)) == works
