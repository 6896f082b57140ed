"""`Observer`: passes results to a callback on a thread of its own, so that the callback cannot disturb requests."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from specbuild.runtime.requests.result import Result

MAX_RESULTS = 1024  # maximum results waiting for the callback: further ones are dropped and counted
LINGER = 1.0  # seconds that the thread waits for another result before it ends
PATIENCE = 1.0  # seconds that `close` waits for the callback
_log = logging.getLogger("specbuild")


class Observer:
    """Calls `call` with one result after another, in the order in which requests ended.

    What `call` raises is logged. If it is slower than requests end, results are dropped and counted in `dropped`. The
    thread starts with a result and ends soon after the last one, so that it does not keep `call` and what it
    references alive.
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
        """Take no more results, wait up to `patience` seconds until all are passed on, and drop the rest."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return  # the callback closes its engine: it gets the remaining results once it returns
        thread.join(patience)
        with self._changed:
            self.dropped += len(self._results)
            self._results.clear()

    def _started(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="specbuild-observer", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread could be started: the next result tries again
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
            except BaseException:  # even SystemExit: the next result is passed on all the same
                _log.exception("on_finish raised, and the engine goes on")
