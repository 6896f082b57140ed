"""Attacks with a fault in each: what a campaign must find, and how it must call it."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from campaign.attack import Attack, Bench
from campaign.outcome import Fault

from specbuild.runtime.errors import PromptError


class Mixed(Attack):
    """By its case's number: passes, is refused, or does one of what nothing may do."""

    def attempt(self, rng: random.Random, place: Path) -> None:
        number = rng.randrange(1000)
        (place / "input.txt").write_text(str(number))
        if number % 3 == 0:
            raise PromptError("no")
        if number % 7 == 0:
            raise ValueError(f"raw {number}")


class Sound(Attack):
    """Passes."""

    def attempt(self, rng: random.Random, place: Path) -> None:
        (place / "input.txt").write_text("sound")


class Refused(Attack):
    """Is refused."""

    def attempt(self, rng: random.Random, place: Path) -> None:
        raise PromptError("no")


class Raw(Attack):
    """Raises what is no SpecbuildError."""

    def attempt(self, rng: random.Random, place: Path) -> None:
        (place / "input.txt").write_text("x")
        raise KeyError("planted")


class Panic(Attack):
    """Raises what is not even an Exception."""

    def attempt(self, rng: random.Random, place: Path) -> None:
        raise BaseException("planted")


class Lines(Attack):
    """Refuses in two lines."""

    def attempt(self, rng: random.Random, place: Path) -> None:
        error = PromptError("planted")
        error.args = ("one\ntwo",)
        raise error


class Wrong(Attack):
    """Sees wrong tokens."""

    def attempt(self, rng: random.Random, place: Path) -> None:
        raise Fault("wrong", "planted")


class Crash(Attack):
    """Kills its process."""

    def attempt(self, rng: random.Random, place: Path) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Hang(Attack):
    """Waits for ever."""

    def attempt(self, rng: random.Random, place: Path) -> None:
        time.sleep(1000)


class Memory(Attack):
    """Takes more memory than a case may."""

    def attempt(self, rng: random.Random, place: Path) -> None:
        taken = []
        while True:
            taken.append(b"x" * (8 << 20))
            time.sleep(0.002)


class Unprepared(Attack):
    """Cannot be prepared."""

    def __init__(self, bench: Bench) -> None:
        raise RuntimeError("planted")
