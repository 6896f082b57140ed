"""The worker's threads: they do what there is to do, hold nothing meanwhile, and end with what they drive."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from specbuild.runtime.engine.worker import Worker


class Work:
    """Counts what it is asked to do."""

    def __init__(self):
        self.done, self.over, self.looked = threading.Semaphore(0), False, threading.Event()
        self.patience: float | None = None

    def work(self):
        self.done.release()
        return self.patience

    def finish(self):
        return self.over

    def watch(self):
        self.looked.set()
        return 3600.0


def test_it_works_when_it_is_woken_and_ends_when_all_is_over():
    """And again after its patience."""
    work = Work()
    worker = Worker(work, None)
    assert not work.done.acquire(timeout=0.05), "nobody has woken it"
    work.patience = 0.01
    worker.wake()
    for _ in range(3):
        assert work.done.acquire(timeout=10)
    assert not worker.join(0)
    assert not worker.here
    work.over = True
    assert worker.join(10)
    assert worker.doing() == "nothing"


@pytest.mark.slow
def test_neither_thread_keeps_what_it_drives():
    work = Work()
    worker, ref = Worker(work, 0.01), weakref.ref(work)
    worker.wake()
    assert work.done.acquire(timeout=10)
    assert work.looked.wait(10)
    work.over = True
    worker.wake(work)
    del work
    assert worker.join(10)
    gc.collect()
    assert ref() is None


def test_a_system_without_threads_is_told(monkeypatch):
    start = threading.Thread.start

    def none_left(thread):
        if thread.name == "specbuild":
            raise RuntimeError("can't start new thread")
        start(thread)

    before = set(threading.enumerate())
    monkeypatch.setattr(threading.Thread, "start", none_left)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Worker(Work(), 3600.0)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), "the watchdog does not outlive it"
