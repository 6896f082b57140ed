"""Signals at bad moments: one line, nothing half-written, an earlier bundle whole, and the next run works."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import safe_open

from specbuild.runtime import Bundle

ENTRY = "from specbuild.cli import main; main()"
READY = "from specbuild.cli import main; print('here'); main()"
STOPPED = "specbuild: interrupted: nothing half-done was left behind\n"
STOPPING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
LIMIT = 60


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@contextmanager
def started(code: str, *arguments: object, **more: object) -> Iterator[subprocess.Popen[str]]:
    """Python code with a command's arguments, which says where it is on standard output."""
    command = [sys.executable, "-u", "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout
    assert select.select([process.stdout], [], [], LIMIT)[0], f"no {word!r}"
    assert process.stdout.readline() == f"{word}\n"


WHILE_IMPORTING = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            print("here")
            time.sleep(60)
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("name", ["click", "specbuild.cli.generate", "onnxruntime"])
def test_while_something_is_imported(bundle: Path, name: str, number: int) -> None:
    with started(WHILE_IMPORTING.format(name=name) + ENTRY, "generate", bundle, "-p", "x") as process:
        wait_for(process, "here")
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err) == (1, "", STOPPED)


def in_command(body: str) -> str:
    """A command `doctor` whose work is something else."""
    return f"""
import signal, sys, time
import click
from specbuild.cli import doctor, main
def examine():
{"".join(f"    {line}{chr(10)}" for line in body.strip().splitlines())}
doctor.examine = examine
sys.argv = ["specbuild", "doctor"]
main()
"""


@pytest.mark.parametrize("number", STOPPING)
def test_more_signals_while_cleaning_up(tmp_path: Path, number: int) -> None:
    """What an output holds is removed whole, whoever presses Ctrl-C again meanwhile."""
    body = f"""
from pathlib import Path
from specbuild.runtime.bundle.atomic_output import staging
import shutil
real = shutil.rmtree
def slow(*args, **more):
    print("cleaning")
    sys.stdin.readline()
    real(*args, **more)
shutil.rmtree = slow
with staging(Path({str(tmp_path / "b")!r}), 0) as folder:
    (folder / "half").write_text("half")
    print("here")
    time.sleep(60)
"""
    with started(in_command(body), stdin=subprocess.PIPE) as process:
        wait_for(process, "here")
        process.send_signal(number)
        wait_for(process, "cleaning")
        for each in STOPPING * 3:
            process.send_signal(each)
        time.sleep(0.05)  # they have come, if any is to
        _, err = process.communicate("go on\n", timeout=LIMIT)
    assert (process.returncode, err) == (1, STOPPED)
    assert snapshot(tmp_path) == {}


def test_an_interrupt_that_a_destructor_swallows_comes_again() -> None:
    body = """
class Swallows:
    def __del__(self):
        print("here")
        time.sleep(60)
each = Swallows()
del each
time.sleep(60)
"""
    with started(in_command(body)) as process:
        wait_for(process, "here")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (1, STOPPED)


def test_what_a_library_makes_of_an_interrupt_is_one_too() -> None:
    """As an extension module does whose imports are interrupted."""
    body = """
try:
    print("here")
    time.sleep(60)
except BaseException as error:
    raise ImportError("initialization failed") from error
"""
    with started(in_command(body)) as process:
        wait_for(process, "here")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (1, STOPPED)


@pytest.mark.parametrize("number", STOPPING)
def test_what_was_ignored_stays_ignored(number: signal.Signals) -> None:
    """nohup ignores SIGHUP; a shell without job control ignores SIGINT for what is behind &."""
    body = """
print("here")
sys.stdin.readline()
return {"machine": "still there"}
"""
    ignoring = f"import signal; signal.signal({int(number)}, signal.SIG_IGN)\n"
    with started(ignoring + in_command(body), stdin=subprocess.PIPE) as process:
        wait_for(process, "here")
        process.send_signal(number)
        out, err = process.communicate("\n", timeout=LIMIT)
    assert (process.returncode, err) == (0, "")
    assert "still there" in out


def test_a_terminal_that_is_gone_with_its_signal() -> None:
    """What can no longer be told is dropped."""
    ours, theirs = os.openpty()
    body = "open(sys.argv[0] and '/dev/fd/9', 'w').write('here'); time.sleep(60)"
    ready, told = os.pipe()
    code = in_command(body.replace("/dev/fd/9", f"/dev/fd/{told}"))
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, pass_fds=[told])
    try:
        assert select.select([ready], [], [], LIMIT)[0]
        os.close(theirs)
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        assert process.wait(LIMIT) == 1
    finally:
        process.kill()
        process.wait()
        os.close(ready)
        os.close(told)


@pytest.fixture
def small(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "small", num_hidden_layers=1)


def commands(small: Path, place: Path) -> dict[str, tuple[list[object], float]]:
    """Arguments, and about how many seconds they take."""
    few = ["--sequence-length", 24, "--depth", 2, "--generate", 96, "--batch-size", 2, "--steps", 4]
    return {
        "build": (["build", "--target", small, "-o", place / "b", "--force", "--max-batch-size", 1, "-q"], 12),
        "tune": (["tune", place / "b", "-n", 8, "-b", 1, "--num-prompts", 3, "-q"], 4),
        "distill": (["distill", small, "--out", place / "d", *few, "--dtype", "fp32", "-q"], 8),
        "pair": (["pair", small, small, "-n", 16, "--num-prompts", 1, "-q"], 12),
    }


def untouched_or_done(name: str, place: Path, before: object, killed: bool = False) -> bool:
    """Whether all was done, because the signal came after the output was renamed into its place; then it is whole."""
    if killed:  # what is hidden beside the outputs goes with the next run
        for left in place.glob(".*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    if snapshot(place) == before:
        return False
    assert {path.name for path in place.iterdir()} <= ({"b", "d", "d.training"} if name == "distill" else {"b"})
    Bundle.open(place / "b").verify()
    if name == "distill" and (place / "d").exists():
        json.loads((place / "d" / "config.json").read_text())
        with safe_open(place / "d" / "model.safetensors", framework="np") as file:
            assert [file.get_tensor(key) for key in file.keys()]  # noqa: SIM118
        return True
    return name != "distill"


@pytest.mark.soak(only=("build", "distill", "pair"))
@pytest.mark.slow
@pytest.mark.parametrize("name", ["build", "tune", "distill", "pair"])
def test_at_random_moments(name: str, small: Path, bundle: Path, tmp_path: Path) -> None:
    rng, place, scratch = random.Random(name), tmp_path / "place", tmp_path / "scratch"
    shutil.copytree(bundle, place / "b")
    scratch.mkdir()
    before = snapshot(place)
    arguments, seconds = commands(small, place)[name]
    for turn in range(6):
        with started(READY, *arguments, env=os.environ | {"TMPDIR": str(scratch)}) as process:
            wait_for(process, "here")
            time.sleep(0.3 + rng.random() * seconds)
            process.send_signal(STOPPING[turn % 3])
            out, err = process.communicate(timeout=LIMIT)
        if process.returncode == 0:  # it was done before
            break
        assert (process.returncode, out, len(err.splitlines())) == (1, "", 1), err
        assert err.startswith("specbuild: interrupted: ")
        assert not [path for path in scratch.iterdir() if path.name.startswith("specbuild")]
        if "keeps what was done" in err:
            shutil.rmtree(place / "d.training")
        if untouched_or_done(name, place, before):
            break


@pytest.mark.soak(only=("build", "distill"))
@pytest.mark.slow
@pytest.mark.parametrize("name", ["build", "tune", "distill"])
def test_killed_at_random_moments(name: str, small: Path, bundle: Path, tmp_path: Path) -> None:
    """Nothing is lost, and the next run works and removes what was left."""
    rng, place = random.Random(name), tmp_path / "place"
    shutil.copytree(bundle, place / "b")
    before = snapshot(place)
    arguments, seconds = commands(small, place)[name]
    for turn in range(4):
        with started(READY, *arguments, *(["--force"] if name == "distill" and turn else [])) as process:
            wait_for(process, "here")
            time.sleep(0.3 + rng.random() * seconds)
            process.kill()
            process.communicate(timeout=LIMIT)
        if process.returncode == 0:
            break
        if untouched_or_done(name, place, before, killed=True):
            break
    more = ["--force"] if name == "distill" else []
    with started(ENTRY, *arguments, *more) as process:
        _, err = process.communicate(timeout=5 * LIMIT)
    assert (process.returncode, err) == (0, "")
    assert {path.name for path in place.iterdir()} == ({"b", "d"} if name == "distill" else {"b"})
    with started(ENTRY, "generate", place / "b", "-p", "x", "-n", 4) as process:
        _, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (0, "")
