"""A worker: a process of its own that tries the cases it is told, and says what came of each."""

import faulthandler
import logging
import os
import random
import shutil
import signal
import sys
import warnings

from .classes import make
from .outcome import PASSED, Outcome, judge

READY = "ready"


def try_case(attack, name, seed, number, place):
    """One case, of a class's random numbers alone."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        attack.attempt(random.Random(f"{seed}:{name}:{number}"), place)
    except BaseException as error:
        return judge(error)
    return Outcome(PASSED)


def work(pipe, bench, seed, place, log):
    """Until the pipe closes: take (class, number), say READY once the class is prepared, then the outcome."""
    _quiet(log)
    prepared = {}
    while True:
        try:
            name, number = pipe.recv()
        except (EOFError, OSError):
            break
        prepared[name] = prepared.get(name) or make(name, bench)
        pipe.send(READY)
        pipe.send(try_case(prepared[name], name, seed, number, place))
    for attack in prepared.values():
        attack.close()


def _quiet(log):
    """Whatever the libraries print goes to a file, as do all stacks where the process dies or is asked for them."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout = sys.stderr = open(file, "w", encoding="utf-8", errors="replace", buffering=1)  # noqa: PTH123, SIM115
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    signal.signal(signal.SIGINT, lambda *_: None)  # not ignored, which its commands would inherit
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
