"""The scheduler: a bounded queue, the free slots, and the one thread that drives the loop."""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from specbuild.runtime.decoding.loop import Loop
from specbuild.runtime.errors import EngineClosedError, QueueFullError
from specbuild.runtime.requests.sequence import Sequence

from .handle import Handle
from .health import Health, Pulse, Usage, health_of
from .observer import Observer


class Scheduler:
    """Takes sequences from any thread; every one of them gets a result.

    In `waiting` are at most `max_waiting`, first come, first served. A caller who waits for room stands in `overflow`
    with one sequence. `clock`: seconds, for deadlines and metrics. `observer` is told every result.
    """

    def __init__(
        self,
        loop: Loop,
        slots: int,
        max_waiting: int,
        clock: Callable[[], float] = time.perf_counter,
        observer: Observer | None = None,
    ) -> None:
        self.slots, self.max_waiting, self.clock = slots, max_waiting, clock
        self.draining = self.closed = False
        self.free, self.active = list(range(slots)), list[Handle]()
        self.waiting, self.overflow = deque[Handle](), deque[Handle]()
        self._promised = dict[int, Sequence]()  # by identity: what windows will submit
        self._loop, self._observer, self._pulse = loop, observer, Pulse(clock)
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # the worker waits for something to do
        self._quiet = threading.Condition(self._lock)  # exclusive sections wait for nothing being active
        self._exclusive = 0  # sections open or wanted: nothing is started meanwhile
        self._entered = self._freed = False
        self._finished = False  # whether nothing was left when it was closed
        self._failure: BaseException | None = None  # what ended the worker
        self._worker: threading.Thread | None = None

    def submit(
        self,
        sequence: Sequence,
        wake: Callable[[], None] | None = None,
        each_round: bool = False,
        wait: bool = True,
    ) -> Handle:
        """Queue a sequence, or stand in line for room; never blocks. `wake`, `each_round`: see `Handle.listen`.

        Raises QueueFullError where there is no room and `wait` is False, and EngineClosedError for what was not
        promised to a draining one. On a closed scheduler the result is "cancelled".
        """
        handle = Handle(sequence, self._cancel, self._observer.tell if self._observer else None)
        if wake:
            handle.listen(wake, each_round)
        with self._lock:
            if not (self._promised.pop(id(sequence), None) or self.closed):
                self.check_open()
            if sequence.metrics.submitted is None:
                sequence.submit(self.clock())
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

    def promise(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that will be submitted bit by bit, and count as submitted now.

        A drain waits until they are, or are withdrawn. Raises EngineClosedError where one has begun.
        """
        with self._lock:
            if not self.closed:
                self.check_open()
            now = self.clock()
            for each in sequences:
                each.submit(now)
                self._promised[id(each)] = each

    def withdraw(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that were promised and will not be submitted."""
        with self._lock:
            for sequence in sequences:
                self._promised.pop(id(sequence), None)
            self._quiet.notify_all()

    def check_open(self) -> None:
        """Raises EngineClosedError where nothing new is taken."""
        if self.closed:
            raise EngineClosedError("the engine is closed: load the bundle again")
        if self.draining:
            raise EngineClosedError("the engine is draining and takes nothing new: load the bundle again")

    @contextmanager
    def exclusive(self) -> Iterator[Loop]:
        """The loop for oneself: waits until nothing is active and holds what waits; raises EngineClosedError."""
        with self._lock:
            self.check_open()
            self._exclusive += 1
            try:
                self._quiet.wait_for(lambda: not self.active and not self._entered)
                if self.closed:
                    self.check_open()
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

    def drain(self, timeout: float | None = None) -> bool:
        """Take nothing new, finish what was submitted or promised, then close; whether all of it finished.

        After `timeout` seconds, for ever without, what is left is cancelled, as by `close` meanwhile.
        """
        with self._lock:
            self.draining = True
            self._quiet.wait_for(lambda: self.closed or self._at_rest(), timeout)
        self.close()
        return self._finished

    def close(self) -> None:
        """Cancel everything, wait for the round under way, end the worker, free the models; again does nothing."""
        with self._lock:
            if not self.closed:
                self.closed, self._finished = True, self._at_rest()
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
        if self._observer:
            self._observer.close()

    def usage(self, cache_tokens: int) -> Usage:
        """How much is in the queue, the slots and the caches; `cache_tokens`: what the slots hold of longest texts."""
        with self._lock:
            kept = (0,) * self.slots if self._freed else self._loop.cached_tokens()
            return Usage(
                waiting=len(self.waiting) + len(self.overflow),
                to_come=len(self._promised),
                running=len(self.active),
                slots=self.slots,
                max_waiting=self.max_waiting,
                cache_tokens=sum(handle.sequence.cached for handle in self.active),
                reusable_tokens=sum(kept[slot] for slot in self.free),
                cache_capacity_tokens=min(self._loop.page_tokens or cache_tokens, cache_tokens),
                dropped_results=self._observer.dropped if self._observer else 0,
            )

    def health(self) -> Health:
        """What the worker does; takes no lock, so a worker that is stuck holds nobody up who asks."""
        return health_of(self._pulse, self._failure, self.closed, self.draining, self._entered, bool(self.active))

    def _at_rest(self) -> bool:
        """Nothing runs, waits or is promised."""
        return not (self.active or self.waiting or self.overflow or self._promised or self._exclusive)

    def _cancel(self, handle: Handle) -> None:
        with self._lock:
            handle.cancelled = True
            if handle.sequence.slot < 0:
                self._sweep()
                self._admit()
                self._quiet.notify_all()

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
                self.closed, self._failure = True, error
                for queue in (self.active, self.waiting, self.overflow):
                    for handle in queue:
                        handle.sequence.fail(error)
                        handle.end("error", self.clock())
                    queue.clear()
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
            with self._pulse.round():
                self._loop.round([handle.sequence for handle in handles])
        except BaseException as error:  # a tokenizer's panic is no Exception
            for handle in handles:
                handle.sequence.fail(error)
        now = self.clock()
        with self._lock:
            for handle in handles:
                sequence = handle.sequence
                if sequence.output and sequence.metrics.first_token is None:
                    sequence.metrics.first_token = now
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
            sequence.slot, sequence.metrics.started = slot, self.clock()
            self.free.remove(slot)
            if not self.active:
                self._pulse.begin()
            self.active.append(handle)

    def _stop(self, handle: Handle) -> None:
        """An active request has ended, or must: free its slot, make its result."""
        self._loop.release(handle.sequence.slot)
        self.active.remove(handle)
        self.free.append(handle.sequence.slot)
        handle.end("cancelled" if handle.cancelled else "deadline", self.clock())
