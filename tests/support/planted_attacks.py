"""Attacks with a fault in each: what a campaign must find, and how it must call it."""

import os
import signal
import time

from campaign.attack import Attack
from campaign.outcome import Fault

from specbuild.runtime.errors import PromptError


def planted(act):
    """A class whose cases do this, with a number that is drawn and kept."""

    class Planted(Attack):
        def attempt(self, rng, place):
            number = rng.randrange(1000)
            (place / "input.txt").write_text(str(number))
            act(number)

    return Planted


def raising(error):
    def act(number):
        raise error

    return planted(act)


def mix(number):
    """Pass, refuse, or do one of what nothing may do."""
    if number % 3 == 0:
        raise PromptError("no")
    if number % 7 == 0:
        raise ValueError(f"raw {number}")


def hoard(number):
    taken = []
    while True:
        taken.append(b"x" * (8 << 20))
        time.sleep(0.002)


LINES = PromptError("planted")
LINES.args = ("one\ntwo",)
Mixed, Memory, Sound = planted(mix), planted(hoard), planted(lambda number: None)
Refused, Raw, Lines = raising(PromptError("no")), raising(KeyError("planted")), raising(LINES)
Panic, Wrong = raising(BaseException("planted")), raising(Fault("wrong", "planted"))
Crash, Hang = planted(lambda number: os.kill(os.getpid(), signal.SIGSEGV)), planted(lambda number: time.sleep(1000))


class Unprepared(Attack):
    """Cannot be prepared."""

    def __init__(self, bench):
        raise RuntimeError("planted")
