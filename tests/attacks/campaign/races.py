"""Attacks by threads: requests that come, go and are cancelled while engines drain, close, are dropped or forked."""

import gc
import os
import random
import subprocess
import sys
import threading
import time

from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.errors import SpecbuildError

from .attack import Attack
from .golden import PROMPTS, TOKENS, params
from .outcome import Fault, judge

PATIENCE = 10.0  # seconds for what must come at once
ENDS = {"stop", "length", "cancelled", "deadline", "error"}


class RacesAttack(Attack):
    """Several threads use one engine; then every request must have ended, and every thread."""

    def attempt(self, rng, place):
        if rng.random() < 0.15:
            return forked(self.bench.bundle, rng.randrange(4))
        before = set(threading.enumerate())
        engine = Engine.load(self.bench.bundle, batch_size=rng.choice((1, 2, 4)), max_waiting=rng.choice((1, 4, 256)))
        race = Race(engine, self.bench.golden.tokens)
        users = [
            threading.Thread(target=race.use, args=(random.Random(rng.random()),), daemon=True)
            for _ in range(rng.choice((2, 4, 8)))
        ]
        for user in users:
            user.start()
        time.sleep(rng.uniform(0, 0.2))
        end = rng.choice(("close", "close twice", "drain", "drain late", "wait", "drop"))
        if end.startswith("drain"):
            engine.drain(rng.choice((0, 0.05)) if end == "drain" else None)
        elif end.startswith("close"):
            closers = [threading.Thread(target=engine.close, daemon=True) for _ in range(len(end.split()))]
            for closer in closers:
                closer.start()
            _join(closers, "close")
        _join(users, f"after {end} a user")
        if race.faults:
            raise race.faults[0]
        if end == "wait":
            self.bench.golden.check(engine)
        if end in ("wait", "drop"):
            _free(engine)
        if end != "drop":
            engine.close()
        race.engine = engine = None
        gc.collect()
        _gone(before, end)


class Race:
    """One engine and what its users saw."""

    def __init__(self, engine, golden):
        self.engine, self.golden, self.faults = engine, golden, list[Fault]()

    def use(self, rng):
        """A user: some requests, of any kind."""
        try:
            for _ in range(rng.choice((1, 3, 6))):
                number = rng.randrange(len(PROMPTS))
                rng.choice((self.generate, self.stream, self.submit, self.submit, self.look))(rng, number)
        except Fault as fault:
            self.faults.append(fault)
        except SpecbuildError as error:
            if judge(error).found:
                self.faults.append(Fault("raw", judge(error).detail))
        except BaseException as error:
            self.faults.append(Fault("raw", judge(error).detail + judge(error).trace[-1500:]))

    def generate(self, rng, number):
        for result in self.engine.generate(PROMPTS[number], params("auto")[number]):
            self.hold(number, result)

    def stream(self, rng, number):
        """A stream, which its reader may leave."""
        chunks, tokens = self.engine.stream(PROMPTS[number], params("auto")[number]), list[int]()
        for chunk in chunks:
            tokens += chunk.token_ids
            if chunk.result:
                self.hold(number, chunk.result)
                if tokens != chunk.result.token_ids:
                    raise Fault("wrong", f"a stream gave {tokens}, its result {chunk.result.token_ids}")
            elif rng.random() < 0.2:
                return chunks.close()

    def submit(self, rng, number):
        """A request of one's own, cancelled or not, in the queue or not."""
        one = params("auto")[number]
        if rng.random() < 0.3:
            one = SamplingParams(max_new_tokens=500, ignore_eos=True, deadline=rng.choice((0.001, 0.05)))
        handle = self.engine.submit(PROMPTS[number], one, wait=rng.random() < 0.7)
        if rng.random() < 0.4:
            time.sleep(rng.uniform(0, 0.02))
            handle.cancel()
        try:
            result = handle.result(PATIENCE)
        except TimeoutError:
            raise Fault("hang", f"a request has not ended after {PATIENCE} s") from None
        if one.max_new_tokens == TOKENS:
            self.hold(number, result)

    def look(self, rng, number):
        """What a service asks meanwhile."""
        self.engine.health()
        usage = self.engine.usage
        if not 0 <= usage.running <= usage.slots:
            raise Fault("wrong", f"{usage.running} requests run in {usage.slots} slots")

    def hold(self, number, result):
        """What came of a golden prompt is its tokens, or their beginning where it was ended."""
        if result.finish_reason not in ENDS:
            raise Fault("wrong", f"a request ended by {result.finish_reason!r}")
        if result.error:
            raise result.error
        wanted, whole = list(self.golden[number]), result.finish_reason in ("stop", "length")
        if result.token_ids != (wanted if whole else wanted[: len(result.token_ids)]):
            raise Fault("wrong", f"{PROMPTS[number]!r} gave {result.token_ids}, plain decoding {wanted}")


def _join(threads, what):
    for thread in threads:
        thread.join(PATIENCE)
        if thread.is_alive():
            stack = sys._current_frames().get(thread.ident or 0)
            at = f"{stack.f_code.co_filename}:{stack.f_lineno}" if stack else "?"
            raise Fault("hang", f"{what} still waits after {PATIENCE} s, at {at}")


def _free(engine):
    """Once every user has gone, every slot is free."""
    _until(lambda: engine.usage.running == engine.usage.waiting == 0, lambda: f"slots stay taken: {engine.usage}")


def _gone(before, end):
    """No thread of the engine's is left."""
    _until(
        lambda: set(threading.enumerate()) <= before,
        lambda: f"after {end} threads are left: {[each.name for each in set(threading.enumerate()) - before]}",
    )


def _until(true, told):
    last = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > last:
            raise Fault("wrong", told())
        gc.collect()
        time.sleep(0.005)


FORKED = """
import os, sys
from specbuild.runtime import Engine
from specbuild.runtime.errors import EngineClosedError
engine = Engine.load(sys.argv[1])
how = int(sys.argv[2])
if how != 3:
    engine.generate("import os")
child = os.fork()
if child == 0:
    try:
        if how == 0:
            engine.generate("import os")
        elif how == 1:
            engine.submit("import os").result()
        elif how == 2:
            engine.close()
            sys.exit(0)
        else:
            with Engine.load(sys.argv[1]) as own:
                own.generate("import os")
            sys.exit(0)
    except EngineClosedError:
        sys.exit(0)
    sys.exit(3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
engine.generate("import os")
engine.close()
sys.exit(status)
"""


def forked(bundle, how):
    """A child forked from a process with an engine is told so at once and exits; its parent goes on."""
    command = [sys.executable, "-c", FORKED, str(bundle), str(how)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        _, errors = process.communicate(timeout=2 * PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        what = ("generate", "submit", "close", "an engine of its own")[how]
        raise Fault("hang", f"a forked child that tried {what} had not ended after {2 * PATIENCE} s") from None
    if process.returncode:
        text = errors.decode(errors="replace")[-1500:]
        raise Fault("wrong", f"a forked child (case {how}) ended with {process.returncode}: {text}")
