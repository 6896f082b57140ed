"""`Window`: submits the many sequences of one caller a few at a time."""

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

    Metrics count all sequences as submitted when the window is made, and a drain lets all of them finish.
    """

    def __init__(
        self, scheduler: Scheduler, sequences: Seq[Sequence], size: int, wake: Callable[[], None], each_round: bool
    ) -> None:
        """Promise the sequences to the scheduler.

        Args:
            scheduler: The scheduler.
            sequences: Sequences to submit, in order.
            size: Maximum number submitted at a time.
            wake: Called, on any thread, when `chunks` has something to do.
            each_round: Whether to call `wake` after each round of a sequence, or only when one is queued or ends.

        Raises:
            EngineClosedError: The scheduler drains.
        """
        scheduler.promise(sequences)
        self._scheduler, self._size, self._wake, self._each_round = scheduler, size, wake, each_round
        self._left, self._running = deque(sequences), list[Handle]()

    @property
    def pending(self) -> bool:
        """Return whether the last chunk of some sequence is still to come."""
        return bool(self._left or self._running)

    def fill(self, wait: bool = True) -> None:
        """Submit sequences while the window has room and none of them waits in the queue's overflow.

        `wait`: see `Scheduler.submit`; False raises QueueFullError if there is no room for the first one.
        """
        while self._left and len(self._running) < self._size and all(handle.queued for handle in self._running):
            handle = self._scheduler.submit(self._left[0], self._wake, self._each_round, wait)
            self._left.popleft()
            self._running.append(handle)
            wait = True  # once one is queued, the others wait for room

    def chunks(self) -> Iterator[Chunk]:
        """Yield new chunks without waiting; then submit as many sequences as have ended."""
        for handle in list(self._running):
            chunk = handle.take()
            if chunk and chunk.result:
                self._running.remove(handle)
            if chunk:
                yield chunk
        self.fill()

    def cancel(self) -> None:
        """Cancel the submitted sequences and withdraw the rest."""
        self._scheduler.withdraw(self._left)
        self._left.clear()
        for handle in self._running:
            handle.cancel()
