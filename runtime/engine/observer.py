"""An observer of results, on a thread of its own: whatever it does, no request notices."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from specbuild.runtime.requests.result import Result

MAX_RESULTS = 1024  # that wait for an observer: what comes beyond is dropped and counted
LINGER = 1.0  # seconds that the thread waits for another result
PATIENCE = 1.0  # seconds that closing waits for an observer
_log = logging.getLogger("specbuild")


class Observer:
    """Calls `call` with one result after another, in the order in which requests ended.

    What it raises is logged and forgotten. Where it is slower than requests end, results are dropped: `dropped` counts
    them. The thread begins with a result and ends soon after the last, so that it keeps nothing that `call` knows.
    """

    def __init__(self, call: Callable[[Result], object], max_results: int = MAX_RESULTS) -> None:
        self.dropped = 0
        self._call, self._max_results, self._closed = call, max_results, False
        self._results, self._changed = deque[Result](), threading.Condition()
        self._thread: threading.Thread | None = None

    def tell(self, result: Result) -> None:
        """Queue a result; never waits and never raises."""
        with self._changed:
            if self._closed or len(self._results) >= self._max_results or not self._started():
                self.dropped += 1
                return
            self._results.append(result)
            self._changed.notify()

    def close(self, patience: float = PATIENCE) -> None:
        """Take no more, wait up to `patience` seconds until all are told, drop the rest. Again does little."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return  # an observer that closes its engine is told what is left when it returns
        thread.join(patience)
        with self._changed:
            self.dropped += len(self._results)
            self._results.clear()

    def _started(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="specbuild-observer", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread to give: the next result tries again
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._results or self._closed, LINGER)
                if not self._results:
                    self._thread = None
                    return
                result = self._results.popleft()
            try:
                self._call(result)
            except BaseException:  # even what would end a thread: the next result is told all the same
                _log.exception("on_finish raised, and the engine goes on")
