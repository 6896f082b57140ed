"""Signals at bad moments: one line, nothing half-written, an earlier bundle whole, and the next run works."""

import random
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from campaign.attack import Bench
from campaign.signals import SignalsAttack

ENTRY = "from specbuild.cli import main; main()"
STOPPED = "specbuild: interrupted: nothing half-done was left behind\n"
STOPPING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
LIMIT = 60


@contextmanager
def started(code, *arguments, **more):
    """Python code with a command's arguments, which says where it is on standard output."""
    command = [sys.executable, "-u", "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process, word):
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


@pytest.mark.slow(but=("click-15",))
@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("name", ["click", "specbuild.cli.generate", "onnxruntime"])
def test_while_something_is_imported(bundle, name, number):
    with started(WHILE_IMPORTING.format(name=name) + ENTRY, "generate", bundle, "-p", "x") as process:
        wait_for(process, "here")
        process.send_signal(number)
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out, err) == (1, "", STOPPED)


def in_command(body):
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


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("number", STOPPING)
def test_more_signals_while_cleaning_up(tmp_path, number):
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
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow(but=("1",))
@pytest.mark.parametrize("number", STOPPING)
def test_what_was_ignored_stays_ignored(number):
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


@pytest.fixture(scope="module")
def attack(bundle, tmp_path_factory):
    return SignalsAttack(Bench(bundle, tmp_path_factory.mktemp("attack")))


@pytest.mark.soak(only=tuple(f"{name}-{seed}" for name in ("build", "distill") for seed in range(4)))
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["build", "tune", "generate", "distill"])
def test_at_random_moments(attack, tmp_path, name, seed):
    """As the campaign does, also by SIGKILL: nothing is lost or left, and the next run works."""
    attack.interrupted(random.Random(f"{name}{seed}"), tmp_path, (name,))
