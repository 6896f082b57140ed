"""`Scheduler`: a bounded queue and slots, for any number of calling threads and one worker."""

from __future__ import annotations

import threading
import time
import weakref
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from specbuild.runtime.decoding.loop import Loop
from specbuild.runtime.errors import EngineClosedError, QueueFullError, shown
from specbuild.runtime.requests.sequence import Sequence

from .driver import Driver, by_priority, look
from .handle import Handle
from .health import Health, Usage, health_of
from .observer import Observer
from .process import FORKED, Home, keep_in_children
from .worker import Worker


class Scheduler(Driver):
    """Takes sequences from any thread and gives every one of them a result.

    The queue `waiting` holds at most `max_waiting` requests, by priority, then first come, first served. A caller who
    waits for room in it has one request in `overflow`. The worker starts with the first request.

    Args:
        loop: Decodes the sequences; closed with the scheduler.
        slots: Number of the loop's slots.
        max_waiting: Maximum requests in the queue.
        clock: Returns seconds, for deadlines and metrics.
        observer: Receives every result; None: nothing does.
        stall_timeout: See `LoadOptions`.
    """

    def __init__(
        self,
        loop: Loop,
        slots: int,
        max_waiting: int,
        clock: Callable[[], float] = time.perf_counter,
        observer: Observer | None = None,
        stall_timeout: float | None = None,
    ) -> None:
        super().__init__(loop, slots, max_waiting, clock, observer, stall_timeout)
        self._home = Home()
        keep_in_children(loop)
        # At exit a daemon thread must not die inside a model. The weak reference lets an unused scheduler be freed.
        weakref.finalize(self, _close_at_exit, weakref.ref(self))

    def submit(
        self, sequence: Sequence, wake: Callable[[], None] | None = None, each_round: bool = False, wait: bool = True
    ) -> Handle:
        """Queue a sequence, or put it in the overflow if the queue is full; never blocks.

        On a closed scheduler the request ends at once, as "cancelled" or with the error that ended the worker.

        Args:
            sequence: The sequence.
            wake: See `Handle.listen`.
            each_round: See `Handle.listen`.
            wait: Whether it may wait in the overflow.

        Raises:
            QueueFullError: The queue is full and `wait` is False.
            EngineClosedError: The scheduler drains and the sequence was not promised, or this is a forked child.
        """
        self._home.check()
        handle = Handle(sequence, self._cancel, self._observer.tell if self._observer else None)
        if wake:
            handle.listen(wake, each_round)
        with self._locked():
            if not (self._promised.pop(id(sequence), None) or self.closed):
                self.check_open()
            if sequence.metrics.submitted is None:
                sequence.submit(self.clock())
            if self.closed:
                if self._failure:
                    sequence.fail(self._failure)
                self._end(handle, "cancelled")
                return handle
            if not wait and (self.overflow or len(self.waiting) >= self.max_waiting):
                raise QueueFullError(
                    f"the queue holds {self.max_waiting} requests and is full: try later, or load with more max_waiting"
                )
            self._worker = self._worker or Worker(self, self.stall_timeout and look(self.stall_timeout))
            insort(self.overflow, handle, key=by_priority)
            self._sweep()
            self._admit()
            self._notify()
        return handle

    def promise(self, sequences: Iterable[Sequence]) -> None:
        """Announce sequences that will be submitted a few at a time; they count as submitted now.

        A drain waits until they are submitted or withdrawn. Raise EngineClosedError if a drain has begun.
        """
        self._home.check()
        with self._locked():
            if not self.closed:
                self.check_open()
            now = self.clock()
            for each in sequences:
                each.submit(now)
                self._promised[id(each)] = each

    def withdraw(self, sequences: Iterable[Sequence]) -> None:
        """Forget promised sequences that will not be submitted."""
        if self._home.left:
            return
        with self._locked():
            for sequence in sequences:
                self._promised.pop(id(sequence), None)
            self._quiet.notify_all()

    def check_open(self) -> None:
        """Raise EngineClosedError if no new requests are taken."""
        self._home.check()
        if self._failure:
            raise EngineClosedError(f"the engine ended by a bug, {shown(self._failure)}: load it again, and report it")
        if self.closed:
            raise EngineClosedError("the engine is closed: load the bundle again")
        if self.draining:
            raise EngineClosedError("the engine is draining and takes nothing new: load the bundle again")

    @contextmanager
    def exclusive(self) -> Iterator[Loop]:
        """Wait until nothing is active, then lend the loop and hold waiting requests; raises EngineClosedError."""
        self._home.check()
        with self._locked():
            self.check_open()
            self.exclusive_sections += 1
            try:
                self._quiet.wait_for(lambda: self.closed or not (self.active or self._entered))
                if self.closed:
                    self.check_open()
                self._entered = threading.get_ident()
            except BaseException:
                self._leave()
                raise
        try:
            yield self._loop
        finally:
            if not self._home.left:
                with self._locked():
                    self._entered = 0
                    self._leave()
                if self.closed and not self._worker:
                    self.close()

    def drain(self, timeout: float | None = None) -> bool:
        """Take nothing new, finish what was submitted or promised, then close; return whether all of it finished.

        After `timeout` seconds (None: never), or when another thread calls `close`, what is left is cancelled.
        """
        self._home.check()
        with self._locked():
            self.draining = True
            timeout = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
            self._quiet.wait_for(lambda: self.closed or self._at_rest(), timeout)
        self.close()
        return self._finished

    def close(self) -> None:
        """Cancel everything, wait for the round under way, end the worker and free the models; idempotent.

        It returns at once if the caller is the worker, holds the lock or is in an exclusive section; the worker then
        closes the rest. It does not wait for a stuck round, but every request has its result. In a forked child it does
        nothing.
        """
        if self._home.left:
            return
        if self._lock._is_owned() or (self._worker and self._worker.here):  # type: ignore[attr-defined]
            self.drop()
            return
        with self._locked():
            self._shut()
        if self._entered == threading.get_ident():
            self._unattended = True
            return
        if self._worker:
            self._await_end(self._worker)
        else:
            self._free()
        if self._observer:
            self._observer.close()

    def drop(self) -> bool:
        """Close without waiting, as a finalizer must: on any thread, with any lock held.

        Return whether the scheduler was still open.
        """
        if self.closed or self._home.left:
            return False
        self._unattended = True
        if self._worker:
            self._worker.wake(self)
        else:
            self.closed = True
            if not self._entered:
                self._free()
        return True

    def __del__(self) -> None:
        if "_home" in self.__dict__:  # absent if `__init__` failed
            self.drop()

    def usage(self, cache_tokens: int) -> Usage:
        """Return how full queue, slots and caches are; `cache_tokens`: all slots' capacity for the longest texts."""
        self._home.check()
        with self._locked():
            kept = (0,) * self.slots if self._freed else self._loop.admission.cached_tokens()
            return Usage(
                waiting=len(self.waiting) + len(self.overflow),
                to_come=len(self._promised),
                running=len(self.active),
                slots=self.slots,
                max_waiting=self.max_waiting,
                cache_tokens=sum(handle.sequence.cached for handle in self.active),
                reusable_tokens=sum(kept[slot] for slot in self.free),
                cache_capacity_tokens=min(self._loop.admission.page_tokens or cache_tokens, cache_tokens),
                dropped_results=self._observer.dropped if self._observer else 0,
            )

    def health(self) -> Health:
        """Return what the worker does; takes no lock, so that a stuck worker does not block the caller."""
        forked = self._home.left
        return health_of(
            self._pulse,
            FORKED if forked else self._failure,
            self.closed or forked,
            self.draining,
            bool(self._entered),
            bool(self.active),
            self.stall_timeout,
        )

    def _cancel(self, handle: Handle) -> None:
        handle.cancelled = True
        if self._home.left:
            return
        if self._lock._is_owned():  # type: ignore[attr-defined]  # in a finalizer: the worker does the rest
            self._notify()
            return
        with self._locked():
            if handle.sequence.slot < 0:
                self._sweep()
                self._admit()
                self._quiet.notify_all()
            elif self._pulse.stuck(self.stall_timeout):
                self._end(handle, "cancelled", cut=True)

    def _leave(self) -> None:
        self.exclusive_sections -= 1
        self._admit()
        self._notify()
        self._quiet.notify_all()


def _close_at_exit(ref: weakref.ref[Scheduler]) -> None:
    scheduler = ref()
    if scheduler:
        scheduler.close()
