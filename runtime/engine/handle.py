"""The handle of a submitted request: its caller's end of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy

from specbuild.runtime.requests.result import Chunk, Result
from specbuild.runtime.requests.sequence import Sequence

from .process import Home

_log = logging.getLogger("specbuild")


class Handle:
    """Wait for `result()`, iterate over chunks, or `cancel()`; from any thread.

    The worker publishes how much of the sequence may be read, and readers take it from there, so nothing is queued
    between them: a slow reader gets longer chunks.
    """

    def __init__(
        self,
        sequence: Sequence,
        cancel: Callable[[Handle], None],
        tell: Callable[[Result], None] | None = None,
    ) -> None:
        """`cancel` passes a cancellation on; `tell` is given the result, by whoever ends the request."""
        self.sequence, self._tell = sequence, tell
        self.queued = False  # False while the caller still waits for room in the queue
        self.cancelled = False  # asked for; the result says what came of it
        self._cancel, self._home = cancel, Home()
        self._ended = threading.Event()
        self._result: Result | None = None
        self._published = 0, ""  # what may be read: tokens, and their text
        self._taken = 0, 0  # what was: tokens, and characters
        self._wake: Callable[[], None] | None = None
        self._each_round = False
        self._whole: str | None = None  # the text when it is complete

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result; what went wrong is in it, not raised.

        Raises TimeoutError after `timeout` seconds, and EngineClosedError in a forked child, where it would not come.
        """
        if not self.done:
            self._home.check()
        if not self._ended.wait(timeout and min(timeout, threading.TIMEOUT_MAX)) or self._result is None:
            raise TimeoutError(f"no result after {timeout} s: the request goes on, wait again or cancel it")
        return self._result

    def cancel(self) -> None:
        """End the request: one that waits never starts, one that runs frees its slot before the next round begins.

        Does nothing to one that has ended. The result has the tokens so far.
        """
        self._cancel(self)

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks as they come, for one reader; the last has the result. Leaving early does not cancel the request."""
        changed = threading.Event()
        self.listen(changed.set, each_round=True)
        while True:
            if not self.done:
                self._home.check()
            changed.clear()
            chunk = self.take()
            if chunk:
                yield chunk
            if chunk and chunk.result:
                return
            changed.wait()

    def listen(self, wake: Callable[[], None], each_round: bool) -> None:
        """Have `wake` called when the request is queued and when it ends, and after each of its rounds if asked.

        It is called on any thread, the worker's included, and no lock is held. What it raises is logged.
        """
        self._wake, self._each_round = wake, each_round

    def wake(self) -> None:
        """Call whoever listens; never raises."""
        try:
            if self._wake:
                self._wake()
        except BaseException:  # whatever it is: the worker and the other requests go on
            _log.exception("what listens to a request raised, and the engine goes on")

    def take(self) -> Chunk | None:
        """What is new since the last call; None where nothing is. With the result once there is one."""
        (start, shown), sequence, result = self._taken, self.sequence, self._result
        stop, text = (len(result.token_ids), result.text) if result else self._published
        if stop == start and not result:
            return None
        self._taken = stop, len(text)
        logprobs = sequence.logprobs[start:stop] if sequence.params.logprobs is not None else None
        new = sequence.output[start:stop], logprobs, result, sequence.drafted[start:stop]
        return Chunk(sequence.index, sequence.sample, text[shown:], *new)

    def publish(self) -> None:
        """For the worker: a round has ended."""
        self._published = len(self.sequence.output), self._text()
        if self._each_round:
            self.wake()

    def complete(self) -> None:
        """For the worker: make the whole text, however long that takes."""
        if self._whole is None:
            self._whole = self._text(whole=True) if self.sequence.output else ""

    def end(self, reason: str, now: float, cut: bool = False) -> None:
        """For the scheduler: make the result, whatever is wrong with it; again does nothing. Never raises.

        `now`: on the scheduler's clock. cut: the worker is still at it, so the result is as far as it was published.
        Whoever listens is to be woken then.
        """
        if self.done:
            return
        try:
            result = self._cut(reason, now) if cut else self._made(reason, now)
        except BaseException as error:
            self.sequence.fail(error)
            result = Result("", [], "error", self.sequence.metrics, None, self.sequence.error)
        self.queued, self._result = True, result
        self._ended.set()
        try:
            if self._tell:
                self._tell(result)
        except BaseException:
            _log.exception("a result could not be told, and the engine goes on")

    def _made(self, reason: str, now: float) -> Result:
        self.complete()
        sequence, metrics = self.sequence, self.sequence.metrics
        sequence.finish_reason = sequence.finish_reason or reason
        sequence.sampler.release()
        tokens, text = sequence.output, self._whole or ""
        metrics.num_output_tokens, metrics.finished = len(tokens), now
        logprobs = sequence.logprobs[: len(tokens)] if sequence.params.logprobs is not None else None
        why = sequence.finish_reason, metrics, logprobs, sequence.error, sequence.stop_reason
        return Result(text, tokens, *why, sequence.drafted[: len(tokens)])

    def _cut(self, reason: str, now: float) -> Result:
        (count, text), sequence, metrics = self._published, self.sequence, deepcopy(self.sequence.metrics)
        metrics.num_output_tokens, metrics.finished = count, now
        logprobs = sequence.logprobs[:count] if sequence.params.logprobs is not None else None
        return Result(text, sequence.output[:count], reason, metrics, logprobs, drafted=sequence.drafted[:count])

    def _text(self, whole: bool = False) -> str:
        """What may be read, nothing held back where it is the whole; as far as it was published if no more can be made.

        A tokenizer that panics raises what is no Exception. That too is the request's error, and nobody else's.
        """
        try:
            if whole:
                self.sequence.detokenizer.finish()
            return self.sequence.detokenizer.text
        except BaseException as error:
            self.sequence.fail(error)
            return self._published[1]
