"""A window over many sequences of one caller: a few of them at a time go through the scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from specbuild.runtime.requests.result import Chunk
from specbuild.runtime.requests.sequence import Sequence

from .handle import Handle
from .scheduler import Scheduler


class Window:
    """Keeps up to `size` sequences submitted, so that no slot is idle and other callers still get their turn.

    By what requests measure all of them are submitted when the window is made, and a drain lets all of them finish.
    `wake` is called when `chunks` has something to do; for every round if `each_round`, else when a sequence ends.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sequences: Seq[Sequence],
        size: int,
        wake: Callable[[], None],
        each_round: bool,
    ) -> None:
        """Raises EngineClosedError where the scheduler drains."""
        scheduler.promise(sequences)
        self._scheduler, self._size, self._wake, self._each_round = scheduler, size, wake, each_round
        self._left, self._running = deque(sequences), list[Handle]()

    @property
    def pending(self) -> bool:
        """Whether some sequence has not had its last chunk."""
        return bool(self._left or self._running)

    def fill(self, wait: bool = True) -> None:
        """Submit what the window has room for, one at a time in the overflow of the queue.

        `wait`: see `Scheduler.submit`; raises QueueFullError.
        """
        while self._left and len(self._running) < self._size and all(handle.queued for handle in self._running):
            handle = self._scheduler.submit(self._left[0], self._wake, self._each_round, wait)
            self._left.popleft()
            self._running.append(handle)
            wait = True  # what was let in is served to its end

    def chunks(self) -> Iterator[Chunk]:
        """Whatever is new, without waiting; what ended makes room for the next."""
        for handle in list(self._running):
            chunk = handle.take()
            if chunk and chunk.result:
                self._running.remove(handle)
            if chunk:
                yield chunk
        self.fill()

    def cancel(self) -> None:
        """Cancel what runs, and forget the rest."""
        self._scheduler.withdraw(self._left)
        self._left.clear()
        for handle in self._running:
            handle.cancel()
