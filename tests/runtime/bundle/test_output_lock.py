"""One writer of an output; what killed ones left is gone or back, and what comes in the meantime stays."""

from __future__ import annotations

import signal
import subprocess
import sys
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
    atomic_output._rename = wait
with atomic_output.staging(output, 1) as folder:
    (folder / "manifest.json").write_text("new")
    if where == "writing":
        wait()
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def start(output: Path, where: str) -> subprocess.Popen[str]:
    """A writer that has come as far as it is asked to."""
    found = subprocess.Popen([sys.executable, "-c", WRITER, str(output), where], stdout=subprocess.PIPE, text=True)
    assert found.stdout
    assert found.stdout.readline() == "there\n"
    return found


def kill(writer: subprocess.Popen[str]) -> None:
    writer.send_signal(signal.SIGKILL)
    writer.wait()


def made(output: Path, text: str) -> Path:
    output.mkdir()
    (output / "manifest.json").write_text(text)
    return output


@pytest.mark.parametrize("precious", [True, False])
@pytest.mark.parametrize("checked", [True, False])
def test_a_folder_that_came_in_the_meantime_stays(tmp_path: Path, precious: bool, checked: bool) -> None:
    """Whether it is found by the second look or, a moment after it, by the rename itself; an empty one too."""
    output = tmp_path / "x.bundle"
    check = (lambda: check_output(output, force=False)) if checked else (lambda: None)

    def write() -> None:
        with staging(output, 1, check) as folder:
            (folder / "manifest.json").write_text("mine")
            output.mkdir()
            if precious:
                (output / "precious").write_text("theirs")
            if not checked:
                Path.exists = lambda self: False if self == output else exists(self)  # type: ignore[method-assign]

    exists = Path.exists
    try:
        with pytest.raises(OutputError, match=r"x\.bundle (exists: give --force|cannot be written \(File exists\))"):
            write()
    finally:
        Path.exists = exists  # type: ignore[method-assign]
    assert names(tmp_path) == ["x.bundle"]
    assert names(output) == (["precious"] if precious else [])


def test_of_two_writers_the_second_is_told_who_the_first_is(tmp_path: Path) -> None:
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


def test_what_a_killed_writer_had_moved_aside_is_back(tmp_path: Path) -> None:
    output = made(tmp_path / "x.bundle", "old")
    kill(start(output, "replacing"))
    assert not output.exists()
    refused = pytest.raises(OutputError, match="exists: give --force")
    with refused, staging(output, 1, lambda: check_output(output, force=False)):
        raise AssertionError
    assert names(tmp_path) == ["x.bundle"]
    assert (output / "manifest.json").read_text() == "old"


def test_others_hidden_folders_stay(tmp_path: Path) -> None:
    """Of other outputs, and what only looks alike."""
    kept = [
        ".x.bundle.training",
        ".x.bundle.new-abc",
        ".y.bundle.new-abcdefgh",
        ".xxbundle.old-abcdefgh",
        "x.bundle.old",
    ]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / ".x.bundle.new-abcdefgh").mkdir()
    (tmp_path / ".x.bundle.new-abcdefgh.rtx-cache").mkdir()
    with staging(tmp_path / "x.bundle", 1):
        pass
    assert names(tmp_path) == sorted([*kept, "x.bundle"])


def test_what_is_put_beside_a_folder_in_the_making_goes_with_it(tmp_path: Path) -> None:
    """As TensorRT-RTX's cache is, where a build's check loads the engines."""
    with staging(tmp_path / "x", 1) as folder:
        folder.with_name(f"{folder.name}.rtx-cache").mkdir()
    assert names(tmp_path) == ["x"]
