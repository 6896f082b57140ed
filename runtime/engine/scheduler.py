"""The scheduler: a bounded queue, the free slots, and the one thread that drives the loop."""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specbuild.runtime.decoding.loop import Loop
from specbuild.runtime.errors import EngineClosedError, QueueFullError
from specbuild.runtime.requests.sequence import Sequence

from .handle import Handle


class Scheduler:
    """Takes sequences from any thread; every one of them gets a result.

    In `waiting` are at most `max_waiting`, first come, first served. A caller who waits for room stands in `overflow`
    with one sequence. `clock`: seconds, for deadlines and metrics.
    """

    def __init__(
        self, loop: Loop, slots: int, max_waiting: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.max_waiting, self.clock, self.closed = max_waiting, clock, False
        self.free, self.active = list(range(slots)), list[Handle]()
        self.waiting, self.overflow = deque[Handle](), deque[Handle]()
        self._loop = loop
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # the worker waits for something to do
        self._quiet = threading.Condition(self._lock)  # exclusive sections wait for nothing being active
        self._exclusive = 0  # sections open or wanted: nothing is started meanwhile
        self._entered = self._freed = False
        self._worker: threading.Thread | None = None

    def submit(
        self,
        sequence: Sequence,
        wake: Callable[[], None] | None = None,
        each_round: bool = False,
        wait: bool = True,
    ) -> Handle:
        """Queue a sequence, or stand in line for room; never blocks. `wake`, `each_round`: see `Handle.listen`.

        Raises QueueFullError where there is no room and `wait` is False. On a closed scheduler the result is
        "cancelled".
        """
        handle = Handle(sequence, self._cancel)
        if wake:
            handle.listen(wake, each_round)
        with self._lock:
            if self.closed:
                handle.end("cancelled", self.clock())
                return handle
            if not wait and (self.overflow or len(self.waiting) >= self.max_waiting):
                raise QueueFullError(
                    f"the queue holds {self.max_waiting} requests and is full: try later, or load with more max_waiting"
                )
            self._start_worker()
            self.overflow.append(handle)
            self._admit()
            self._work.notify()
        return handle

    @contextmanager
    def exclusive(self) -> Iterator[Loop]:
        """The loop for oneself: waits until nothing is active and holds what waits; raises EngineClosedError."""
        with self._lock:
            self._exclusive += 1
            try:
                self._quiet.wait_for(lambda: not self.active and not self._entered)
                if self.closed:
                    raise EngineClosedError("the engine is closed: load the bundle again")
                self._entered = True
            except BaseException:
                self._leave()
                raise
        try:
            yield self._loop
        finally:
            with self._lock:
                self._entered = False
                self._leave()

    def close(self) -> None:
        """Cancel everything, wait for the round under way, end the worker, free the models; again does nothing."""
        with self._lock:
            self.closed = True
            for handle in [*self.waiting, *self.overflow, *self.active]:
                handle.cancelled = True
            self._sweep()
            self._work.notify()
            self._quiet.wait_for(lambda: not self._entered)
        if self._worker:
            self._worker.join()
            atexit.unregister(self.close)
        with self._lock:
            self._quiet.notify_all()
            if not self._freed:
                self._freed = True
                self._loop.close()

    def _cancel(self, handle: Handle) -> None:
        with self._lock:
            handle.cancelled = True
            if handle.sequence.slot < 0:
                self._sweep()
                self._admit()

    def _leave(self) -> None:
        self._exclusive -= 1
        self._admit()
        self._work.notify()
        self._quiet.notify_all()

    def _start_worker(self) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._run, name="specbuild", daemon=True)
            try:
                self._worker.start()
            except RuntimeError:  # the system has no thread to give: the next submission tries again
                self._worker = None
                raise
            atexit.register(self.close)  # a daemon thread must not die inside a model

    def _run(self) -> None:
        """The worker: rounds while there is work."""
        try:
            while handles := self._next():
                self._round(handles)
        except BaseException as error:  # a bug here: nobody must wait for ever
            with self._lock:
                self.closed = True
                for handle in [*self.active, *self.waiting, *self.overflow]:
                    handle.sequence.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
                    handle.end("error", self.clock())
                self.active.clear()
                self.waiting.clear()
                self.overflow.clear()
                self._quiet.notify_all()

    def _next(self) -> list[Handle]:
        """Who takes part in the next round; waits for somebody. Nobody: the scheduler is closed."""
        with self._lock:
            while True:
                self._sweep()
                now = self.clock()
                for handle in [h for h in self.active if h.cancelled or now >= h.sequence.deadline]:
                    self._stop(handle)
                self._admit()
                if self.active:
                    return list(self.active)
                self._quiet.notify_all()
                if self.closed:
                    return []
                self._work.wait(self._patience(now))

    def _patience(self, now: float) -> float | None:
        """Seconds until the first deadline of what waits, which an exclusive section may hold; None for ever."""
        first = min((handle.sequence.deadline for handle in [*self.waiting, *self.overflow]), default=math.inf)
        return None if first == math.inf else max(first - now, 0.0)

    def _round(self, handles: list[Handle]) -> None:
        """One round; a step that fails is the result of all who were in it."""
        try:
            self._loop.round([handle.sequence for handle in handles])
        except Exception as error:
            for handle in handles:
                handle.sequence.fail(error)
        now = self.clock()
        with self._lock:
            for handle in handles:
                sequence = handle.sequence
                if sequence.output and not sequence.metrics.ttft:
                    sequence.metrics.ttft = now - sequence.started
                if not sequence.finish_reason:
                    handle.publish()
                if sequence.finish_reason:
                    self._stop(handle)

    def _sweep(self) -> None:
        """End what waits and was cancelled, or is past its deadline."""
        now = self.clock()
        for queue in (self.waiting, self.overflow):
            for handle in [h for h in queue if h.cancelled or now >= h.sequence.deadline]:
                queue.remove(handle)
                handle.end("cancelled" if handle.cancelled else "deadline", now)

    def _admit(self) -> None:
        """Whoever stands in line enters the queue as far as there is room; whoever waits gets a free slot, in turn."""
        while True:
            while self.overflow and len(self.waiting) < self.max_waiting:
                self.waiting.append(self.overflow.popleft())
                self.waiting[-1].enter()
            if not (self.waiting and self.free) or self._exclusive:
                return
            handle = self.waiting[0]
            sequence, slot = handle.sequence, self._loop.pick(handle.sequence, self.free)
            if slot is None:
                return
            self.waiting.popleft()
            sequence.slot, sequence.started = slot, self.clock()
            self.free.remove(slot)
            self.active.append(handle)

    def _stop(self, handle: Handle) -> None:
        """An active request has ended, or must: free its slot, make its result."""
        self._loop.release(handle.sequence.slot)
        self.active.remove(handle)
        self.free.append(handle.sequence.slot)
        handle.end("cancelled" if handle.cancelled else "deadline", self.clock())
