"""A process that forks after its engine was loaded: the child is told what to do at once, and ends."""

import subprocess
import sys
from pathlib import Path

import pytest
from campaign.races import forked

TESTS = Path(__file__).resolve().parent.parent
SCRIPT = """
import asyncio, os, sys, threading, time
sys.path[:0] = [{support!r}]
import hash_models
from specbuild.runtime import AsyncEngine, SamplingParams
from specbuild.runtime.errors import EngineClosedError

LONG, seen, armed, forked = SamplingParams(max_new_tokens=100), [], [], []

def clock():  # a submission reads it while it holds the engine's lock
    if armed:
        armed.clear()
        reader = threading.Thread(target=lambda: engine.usage)
        reader.start()
        reader.join(0.1)
        assert reader.is_alive(), "nobody else gets the lock"
        forking = threading.Thread(target=fork)
        forking.start()
        forking.join()
    return time.monotonic()

engine = next(makers := hash_models.hash_engine.__wrapped__())(batch_size=2, gated=True, clock=clock)
stream = engine.stream("cd", LONG)
if {used}:
    handle = engine.submit("ab", LONG)
    engine.gate.halted()

def refused(call):
    try:
        call()
    except EngineClosedError as error:
        assert "load the bundle in each worker, after the fork" in str(error), error
        seen.append(1)

def child():
    for call in (
        lambda: engine.generate("ab"), lambda: next(engine.stream("ab")), lambda: engine.submit("ab"),
        lambda: engine.logits([1]), lambda: engine.drain(), lambda: engine.usage,
        lambda: asyncio.run(AsyncEngine(engine).generate("ab")),
        *((lambda: handle.result(), lambda: next(iter(handle))) if {used} else ()),
    ):
        refused(call)
    assert len(seen) == (9 if {used} else 7), len(seen)
    assert engine.health().state == "closed"
    if {used}:
        handle.cancel()
    with engine:
        pass
    asyncio.run(AsyncEngine(engine).close())

def fork():
    forked.append(os.fork())
    if not forked[0]:
        child()
        os._exit(0)

armed.append(True)  # the worst moment: amid a round, with the lock held, and that by another thread
engine.submit("cd", LONG)
assert os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1]) == 0
engine.gate.open()
if {used}:
    assert handle.result(20).finish_reason == "length"
assert engine.generate("cd", LONG)[0].finish_reason == "length"
engine.close()
print("parent unharmed")
"""


@pytest.mark.slow
@pytest.mark.parametrize("used", [True, False])
def test_a_child_of_a_process_with_an_engine(used):
    """Forked on a thread: that is the child's only one then, whatever the others held."""
    script = SCRIPT.format(support=str(TESTS / "support"), used=used)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "parent unharmed\n"), done.stderr


@pytest.mark.slow
@pytest.mark.nightly(but=("0",))
@pytest.mark.parametrize("how", range(4))
def test_a_child_ends_though_the_models_have_threads(bundle, how):
    forked(bundle, how)
