"""Attacks on the command: signals at any moment, no room, no memory, no permission, files that change meanwhile."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager

from specbuild.runtime import Engine
from specbuild.runtime.bundle.bundle import Bundle

from . import tiny_pair
from .attack import Attack
from .bundle_copy import copied, manifest, replace
from .golden import Golden
from .mutations import mutate_bytes
from .outcome import Fault
from .processes import Process

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
FINISHED = 300.0  # seconds of computing that a whole command may take
MIB = 1 << 20
INTERRUPTED = ("build", "tune", "tune", "generate", "generate", "generate", "distill")


class SignalsAttack(Attack):
    """Runs `specbuild build`, `tune`, `generate` and `distill`, and interferes."""

    def __init__(self, bench):
        super().__init__(bench)
        self.target = bench.once("tiny", lambda folder: tiny_pair.checkpoint(folder, 1))
        self.older = bench.once("older.bundle", self._build)
        self.golden = Golden.of(self.older)
        build = json.loads((bench.home / "seconds.json").read_text())
        self.seconds = {"build": build, "distill": build / 2, "tune": build / 8, "generate": build / 20}  # about

    def attempt(self, rng, place):
        kinds = (self.toctou, self.toctou, self.interrupted, self.interrupted, self.starved, self.full, self.read_only)
        rng.choice(kinds)(rng, place)

    def command(self, name, place):
        """The command, whose output is `place/out`; of tune and generate it is the bundle too."""
        out = str(place / "out")
        return {
            "build": ["build", "--target", str(self.target), "-o", out, "--force", *tiny_pair.BUILD],
            "tune": ["tune", out, "-n", "8"],
            "generate": ["generate", out, "-p", "import os", "-n", "40", "--ignore-eos"],
            "distill": [
                *("distill", str(self.target), "-o", str(place / "draft"), "--text", __file__, "--steps", "6"),
                *("--eval-every", "3", "--save-every", "3", "--sequence-length", "24", "--batch-size", "2"),
            ],
        }[name]

    def interrupted(self, rng, place, names=INTERRUPTED):
        """A signal at any moment: what was there stays whole, nothing is left beside it, the next run works."""
        name = rng.choice(names)
        number, fresh = rng.choice(SIGNALS), name == "build" and rng.random() < 0.3
        if not fresh:
            shutil.copytree(self.older, place / "out")
        process = Process(self.command(name, place), place)
        moment = rng.uniform(0.0, 1.1) * self.seconds[name]
        sent = process.signal_after(moment, number)
        ended = process.ended()
        process.hold(ended, (0, 1, *((-number,) if self._early(number, ended) else ())) if sent else (0,))
        self.whole(place, fresh)
        if number != signal.SIGKILL:
            self.tidy(place, name)
        if name != "distill" or number == signal.SIGKILL:
            self.next(rng, name, place)

    def _early(self, number, ended):
        """Whether a process may die of the signal itself: of SIGKILL, or before it is ours, while Python starts."""
        ours = re.findall(r'File "[^"]*/((?:face|cli|runtime|builder|measure)/[^"]*)"', ended.err)
        starting = ended.err.endswith("KeyboardInterrupt\n") and {*ours} <= {"face/specbuild/__init__.py"}
        return number == signal.SIGKILL or not ended.err or starting

    def next(self, rng, name, place):
        """The same command again, now and then where it takes long: it works and leaves nothing beside its output."""
        if name in ("build", "distill") and rng.random() < 0.6:
            return
        more = ["--resume"] if (place / "draft.training").exists() else []
        if name == "distill" and (place / "draft").exists():
            more = ["--force"]  # it was done before the signal came
        (place / "stderr.txt").write_bytes(b"")
        process = Process([*self.command(name, place), *more], place)
        process.hold(process.ended(FINISHED), (0,))
        self.tidy(place, name)
        self.whole(place, fresh=False)

    def whole(self, place, fresh):
        """The bundle at the output is whole and gives its tokens; a fresh one may not be there."""
        out = place / "out"
        if not out.exists():
            if not fresh:
                raise Fault("wrong", "the bundle that was there is gone")
            return
        try:
            Bundle.open(out).verify()
            with Engine.load(out) as engine:
                self.golden.check(engine)
        except Exception as error:
            raise Fault("wrong", f"the bundle that was there is damaged: {error}") from error

    def tidy(self, place, name):
        """Nothing is beside the output."""
        known = {"out", "draft", "draft.training", "stdout.txt", "stderr.txt"}  # a training can be resumed
        left = sorted(path.name for path in place.iterdir() if path.name not in known)
        inside = sorted(path.name for path in (place / "out").glob(".*")) if (place / "out").is_dir() else []
        if left or inside:
            raise Fault("wrong", f"{name} left {', '.join(left + inside)}")

    def starved(self, rng, place):
        """Not enough memory, as by `ulimit -v`."""
        name = rng.choice(("tune", "generate", "generate", "build"))
        shutil.copytree(self.older, place / "out")
        most = round(rng.uniform(*((300, 1800) if name == "build" else (60, 700)))) * MIB
        (place / "limit.txt").write_text(f"ulimit -v {most >> 10}\n")
        process = Process(self.command(name, place), place, [(resource.RLIMIT_AS, most)])
        (place / "limit.txt").unlink()
        ended = process.ended(FINISHED)
        process.hold(ended, (0, 1, 2), starved=True)
        self.whole(place, fresh=False)
        if ended.status >= 0:  # what aborts cannot tidy up; the next run does
            self.tidy(place, name)

    def full(self, rng, place):
        """No room: a small file system that is full, or files that may not grow."""
        name = rng.choice(("build", "tune", "tune", "tune"))
        with small(place / "disk", rng.choice((3, 4, 8))) as disk:
            shutil.copytree(self.older, disk / "out", dirs_exist_ok=True)
            limits = []
            if os.path.ismount(disk):
                free = shutil.disk_usage(disk).free
                (disk / "stdout.txt").write_bytes(b"\0" * max(free - rng.choice((0, 1 << 12, 1 << 14, 1 << 20)), 0))
                (disk / "stdout.txt").rename(disk / "draft")  # a known name
            else:
                limits = [(resource.RLIMIT_FSIZE, rng.choice((0, 1 << 10, 1 << 14, 1 << 18)))]
            process = Process(self.command(name, disk), place, limits)
            process.hold(process.ended(FINISHED), (0, 1, 2))
            self.whole(disk, fresh=False)
            self.tidy(disk, name)

    def read_only(self, rng, place):
        """No permission to write where the output is."""
        name = rng.choice(("build", "tune", "generate", "generate"))
        with small(place / "disk", 16) as disk:
            shutil.copytree(self.older, disk / "out", dirs_exist_ok=True)
            if os.path.ismount(disk):
                subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, capture_output=True)
            else:
                (disk / "out").chmod(0o500)
                disk.chmod(0o500)
            process = Process(self.command(name, disk), place)
            try:
                free = os.access(disk, os.W_OK)
                process.hold(process.ended(FINISHED), (0, 1, 2) if free else (0,) if name == "generate" else (1, 2))
                self.whole(disk, fresh=False)
            finally:
                if not os.path.ismount(disk):
                    disk.chmod(0o700)
                    (disk / "out").chmod(0o700)

    def toctou(self, rng, place):
        """A file of a bundle is another while the bundle loads: either it is refused, or the tokens are right."""
        root = copied(self.bench.bundle, place)
        name = rng.choice(sorted(manifest(root)["files"]))
        content, other = (root / name).read_bytes(), place / "other"
        replace(other, mutate_bytes(rng, content))
        moment, back = rng.uniform(0, 0.08), rng.random() < 0.4
        spare = place / "spare"
        os.link(root / name, spare)

        def swap():
            time.sleep(moment)
            other.replace(root / name)
            if back:
                time.sleep(moment / 4)
                spare.replace(root / name)

        thread = threading.Thread(target=swap)
        thread.start()
        try:
            with Engine.load(root, batch_size=rng.choice((1, 2))) as engine:
                self.bench.golden.check(engine)
        finally:
            thread.join()

    def _build(self, folder):
        place = folder.with_suffix(".making")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        process = Process(self.command("build", place), place)
        ended = process.ended(FINISHED)
        if ended.status:
            raise RuntimeError(f"the tiny bundle was not built: {ended.err}")
        (self.bench.home / "seconds.json").write_text(json.dumps(ended.seconds))
        (place / "out").rename(folder)


@contextmanager
def small(folder, mib):
    """A file system of so many MiB where mounting is allowed, else a folder."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)
