"""The worker's side of the scheduler: it runs rounds while there is work, and ends every request whatever fails."""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from specbuild.runtime.decoding.error_isolation import isolate
from specbuild.runtime.decoding.loop import Loop
from specbuild.runtime.requests.sequence import Sequence

from .handle import Handle
from .health import Pulse
from .observer import Observer
from .worker import Worker

_LONG = 3600.0  # maximum seconds of one wait: thread clocks have an upper limit
_LOOK = 1.0  # maximum seconds between two checks of a stuck worker
_log = logging.getLogger("specbuild")


def by_priority(handle: Handle) -> int:
    """Return the sort key of a request: its priority, where lower goes first."""
    return handle.sequence.params.priority


class Driver:
    """The worker's side of the scheduler (see `Driven`); its subclass `Scheduler` is the callers' side.

    The lock is never held while a model runs, while text is decoded, or while a waiting caller is woken.
    """

    def __init__(
        self,
        loop: Loop,
        slots: int,
        max_waiting: int,
        clock: Callable[[], float],
        observer: Observer | None,
        stall_timeout: float | None,
    ) -> None:
        self.slots, self.max_waiting, self.clock, self.stall_timeout = slots, max_waiting, clock, stall_timeout
        self.closed = self.draining = False
        self.free, self.active = list(range(slots)), list[Handle]()
        self.waiting, self.overflow = deque[Handle](), deque[Handle]()
        self._promised = dict[int, Sequence]()  # by id(): sequences that windows will submit
        self._loop, self._observer, self._pulse = loop, observer, Pulse(clock)
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)  # what `drain`, `exclusive` and `_free` wait on
        self._woken = deque[Handle]()  # handles whose listeners are woken once the lock is free
        self.exclusive_sections = 0  # exclusive sections open or wanted: no request starts meanwhile
        self._entered = 0  # ident of the thread inside an exclusive section; 0: none
        self._idle, self._freed, self._warned = True, False, False
        self._unattended = False  # no caller waits for the end, so the worker closes everything
        self._finished = False  # whether no request was left when it was closed
        self._failure: BaseException | None = None  # the error that ended the worker
        self._patience: float | None = None  # while idle: seconds until the first deadline in the queue
        self._worker: Worker | None = None

    def work(self) -> float | None:
        """See `Driven.work`; an error here is a bug: it ends the worker and every request, so no caller hangs."""
        try:
            with self._pulse.work():
                while handles := self._next():
                    self._round(handles)
            return self._patience
        except BaseException as error:
            self._fail(error)
            return None

    def finish(self) -> bool:
        """See `Driven.finish`."""
        if not self.closed:
            return False
        self._free()
        if self._unattended and self._observer:
            self._observer.close()
        return True

    def watch(self) -> float:
        """See `Driven.watch`. If the worker is stuck, end requests that are cancelled or past their deadlines."""
        timeout = self.stall_timeout
        if timeout is None or self._worker is None or not self._pulse.stuck(timeout):
            self._warned = False
            return look(timeout)
        if not self._warned:
            self._warned = True
            told = "no round has ended for %.0f s (stall_timeout is %g): the worker is in %s"
            _log.warning(told, self._pulse.seconds, timeout, self._worker.doing())
        self._cut()
        return min(look(timeout), _LOOK)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; afterwards wake the listeners collected meanwhile."""
        try:
            with self._lock:
                yield
        finally:
            self._wake()

    def _wake(self) -> None:
        with suppress(IndexError):  # the deque is empty
            while True:
                self._woken.popleft().wake()

    def _notify(self) -> None:
        """Wake the worker if it is idle."""
        if self._idle and self._worker:
            self._idle = False
            self._worker.wake()

    def _at_rest(self) -> bool:
        """Return whether no request runs, waits or is promised, and no exclusive section is open or wanted."""
        return not (self.active or self.waiting or self.overflow or self._promised or self.exclusive_sections)

    def _now(self) -> float:
        """Return the clock's time, or the last known one if the clock fails: a request must end all the same."""
        try:
            return self.clock()
        except BaseException:
            return self._pulse.since

    def _next(self) -> list[Handle]:
        """Return the requests of the next round; an empty list if there is nothing to do for now."""
        while True:
            with self._locked():
                if self._unattended and not self.closed:
                    self._shut()
                self._sweep()
                now = self.clock()
                ending = [handle for handle in self.active if handle.stops(now)]
                if not ending:
                    self._admit()
                    if self.active:
                        return list(self.active)
                    deadlines = [handle.sequence.deadline for handle in (*self.waiting, *self.overflow)]
                    self._patience = min(max(min(deadlines) - now, 0.0), _LONG) if deadlines else None
                    self._idle = True
                    self._quiet.notify_all()
                    return []
            self._retire(ending)

    def _round(self, handles: list[Handle]) -> None:
        """Run one round; an error in the step becomes the result of every request in it."""
        with self._pulse.round():
            try:
                self._loop.round([handle.sequence for handle in handles])
            except BaseException as error:  # a tokenizer's panic is not an Exception
                for handle in handles:
                    if not handle.sequence.finish_reason:
                        handle.sequence.fail(error)
            now = self.clock()
            for handle in handles:
                sequence = handle.sequence
                if sequence.output and sequence.metrics.first_token is None:
                    sequence.metrics.first_token = now
                if not sequence.finish_reason:
                    handle.publish()
        self._retire([handle for handle in handles if handle.sequence.finish_reason])

    def _retire(self, handles: list[Handle]) -> None:
        """End active requests that have finished or must stop: complete their texts and free their slots."""
        for handle in handles:
            handle.complete()
        with self._locked():
            for handle in handles:
                self._loop.release(handle.sequence.slot)
                self.active.remove(handle)
                self.free.append(handle.sequence.slot)
                self._end(handle)

    def _end(self, handle: Handle, reason: str | None = None, cut: bool = False) -> None:
        """End a request; without a reason it was cancelled or has passed its deadline, if its text has not ended."""
        handle.end(reason or ("cancelled" if handle.cancelled else "deadline"), self._now(), cut)
        self._woken.append(handle)

    def _make_way(self) -> None:
        """Cancel background requests if there is any other work, a drain or an exclusive section."""
        handles = (*self.active, *self.waiting, *self.overflow)
        background = [handle for handle in handles if handle.sequence.params.background]
        others = len(background) < len(handles) or not all(s.params.background for s in self._promised.values())
        if others or self.draining or self.exclusive_sections:
            for handle in background:
                handle.cancelled = True

    def _sweep(self) -> None:
        """End waiting requests that are cancelled or past their deadlines."""
        self._make_way()
        now = self.clock()
        for queue in (self.waiting, self.overflow):
            for handle in [handle for handle in queue if handle.stops(now)]:
                queue.remove(handle)
                self._end(handle)

    def _admit(self) -> None:
        """Move requests from the overflow into the queue while it has room, and in turn from there into free slots."""
        while True:
            while self.overflow and len(self.waiting) < self.max_waiting:
                handle = self.overflow.popleft()
                insort(self.waiting, handle, key=by_priority)
                handle.queued = True
                self._woken.append(handle)
            if not (self.waiting and self.free) or self.exclusive_sections:
                return
            handle, slot = self.waiting[0], None
            sequence = handle.sequence
            try:
                slot = self._loop.admission.pick(sequence, self.free)
            except BaseException as error:
                isolate(sequence, error)
            if sequence.error:
                self.waiting.popleft()
                self._end(handle, "error")
                continue
            if slot is None:
                return
            self.waiting.popleft()
            sequence.slot, sequence.metrics.started = slot, self.clock()
            self.free.remove(slot)
            if not self.active:
                self._pulse.begin()
            self.active.append(handle)

    def _shut(self) -> None:
        """Close while holding the lock: waiting requests end now, active ones before the next round."""
        if not self.closed:
            self.closed, self._finished = True, self._at_rest()
        for handle in (*self.waiting, *self.overflow, *self.active):
            handle.cancelled = True
        self._sweep()
        self._notify()
        self._quiet.notify_all()

    def _cut(self) -> None:
        """End requests that the stuck worker should have ended, without touching the sequences that it works on."""
        if not self._lock.acquire(timeout=_LOOK):  # the worker is stuck while holding the lock
            return
        try:
            now = self._now()
            self._sweep()
            for handle in self.active:
                if handle.stops(now):
                    self._end(handle, cut=True)
        finally:
            self._lock.release()
            self._wake()

    def _await_end(self, worker: Worker) -> None:
        """Wait until the worker ends; give up if it is stuck in a round."""
        while not worker.join(min(look(self.stall_timeout), _LOOK)):
            if self._pulse.stuck(self.stall_timeout):
                self._cut()
                told = "closed while the worker is stuck in %s: the models are freed when it comes back"
                _log.error(told, worker.doing())
                return

    def _free(self) -> None:
        """Free the models once no exclusive section is open."""
        with self._locked():
            self._quiet.wait_for(lambda: not self._entered)
            freed, self._freed = self._freed, True
            self._quiet.notify_all()
        if not freed:
            try:
                self._loop.close()
            except BaseException:  # no caller can do anything about it
                _log.exception("the models could not be freed")

    def _fail(self, error: BaseException) -> None:
        """End every request with the bug that ends the worker, so that no caller waits forever."""
        with self._lock:
            self.closed, self._failure = True, error
            handles = [*self.active, *self.waiting, *self.overflow]
            for queue in (self.active, self.waiting, self.overflow):
                queue.clear()
            self._quiet.notify_all()
        for handle in handles:
            if not handle.sequence.finish_reason:
                handle.sequence.fail(error)
            handle.end("error", self._now())
            handle.wake()
        self._wake()
        _log.error("the engine ended by a bug: report it", exc_info=error)


def look(stall_timeout: float | None) -> float:
    """Return the seconds between two checks of the worker."""
    return _LONG if stall_timeout is None else min(stall_timeout / 4, _LONG)
