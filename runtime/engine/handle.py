"""`Handle`: what a caller holds of a submitted request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy

from specbuild.runtime.requests.result import Chunk, Result
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.sampling.logprobs import TokenLogprobs

from .process import Home

_log = logging.getLogger("specbuild")


class Handle:
    """A submitted request: wait for its `result()`, iterate over its chunks, or `cancel()` it, from any thread.

    The worker publishes how far the sequence may be read, and a reader takes what is new from there. Nothing is queued
    between them: a slow reader gets longer chunks.
    """

    def __init__(
        self, sequence: Sequence, cancel: Callable[[Handle], None], tell: Callable[[Result], None] | None = None
    ) -> None:
        """Make the handle of a sequence that is about to be queued.

        Args:
            sequence: The sequence.
            cancel: Called by `Handle.cancel` with this handle.
            tell: Called with the result, on the thread that ends the request; None: nothing is called.
        """
        self.sequence, self._tell = sequence, tell
        self.queued = False  # False while the request still waits for room in the queue
        self.cancelled = False  # whether cancellation was asked for; the result says how the request ended
        self._cancel, self._home = cancel, Home()
        self._ended = threading.Event()
        self._result: Result | None = None
        self._published = 0, ""  # what may be read: number of tokens, and their text
        self._taken = 0, 0  # what has been read: number of tokens and of characters
        self._wake: Callable[[], None] | None = None
        self._each_round = False
        self._whole: str | None = None  # the complete text, once it is made

    def stops(self, now: float) -> bool:
        """Return whether the request must stop: it is cancelled, or past its deadline at `now`, by the scheduler."""
        return self.cancelled or now >= self.sequence.deadline

    @property
    def done(self) -> bool:
        """Return whether the request has its result."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result and return it; the request's own error is in the result, not raised.

        Args:
            timeout: Seconds to wait; None: without limit.

        Raises:
            TimeoutError: There was no result within `timeout`; the request goes on.
            EngineClosedError: The process is a forked child, where the result would never come.
        """
        if not self.done:
            self._home.check()
        if not self._ended.wait(timeout and min(timeout, threading.TIMEOUT_MAX)) or self._result is None:
            raise TimeoutError(f"no result after {timeout} s: the request goes on, wait again or cancel it")
        return self._result

    def cancel(self) -> None:
        """End the request; its result has the tokens so far.

        A waiting request never starts; a running one frees its slot before the next round begins. Nothing happens to a
        request that has ended.
        """
        self._cancel(self)

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks as they come, the last with the result; for one reader, who may leave without cancelling."""
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
        """Have a function called when the request enters the queue and when it ends.

        Args:
            wake: The function. It may be called on any thread, the worker's included, while no lock is held; what it
                raises is logged.
            each_round: Whether to call it after each of the request's rounds too.
        """
        self._wake, self._each_round = wake, each_round

    def wake(self) -> None:
        """Call the listener, if there is one; never raises."""
        try:
            if self._wake:
                self._wake()
        except BaseException:  # whatever it raises, the worker and the other requests go on
            _log.exception("what listens to a request raised, and the engine goes on")

    def take(self) -> Chunk | None:
        """Return what is new since the last call, with the result once there is one; None if nothing is new."""
        (start, shown), sequence, result = self._taken, self.sequence, self._result
        stop, text = (len(result.token_ids), result.text) if result else self._published
        if stop == start and not result:
            return None
        self._taken = stop, len(text)
        tokens, logprobs, drafted = self._part(start, stop)
        prompt, request = None if start else _prompt_logprobs(sequence), sequence.request
        return Chunk(request.index, request.sample, text[shown:], tokens, logprobs, result, drafted, prompt)

    def _part(self, start: int, stop: int) -> tuple[list[int], list[TokenLogprobs] | None, list[bool]]:
        """Return some output tokens, their log-probabilities if they are asked for, and which of them were drafted."""
        sequence = self.sequence
        logprobs = sequence.logprobs[start:stop] if sequence.params.logprobs is not None else None
        return sequence.output[start:stop], logprobs, sequence.drafted[start:stop]

    def publish(self) -> None:
        """Publish what may be read after a round; the worker calls it."""
        self._published = len(self.sequence.output), self._text()
        if self._each_round:
            self.wake()

    def complete(self) -> None:
        """Make the whole text, however long that takes; the worker calls it."""
        if self._whole is None:
            self._whole = self._text(whole=True) if self.sequence.output else ""

    def end(self, reason: str, now: float, cut: bool = False) -> None:
        """Make the result, whatever fails; never raises, and does nothing when called again.

        The scheduler calls it, and must call `wake` afterwards.

        Args:
            reason: The finish reason, unless the sequence already has one.
            now: Time in seconds on the scheduler's clock.
            cut: Whether the worker may still be working on the sequence; the result then has only what was published.
        """
        if self.done:
            return
        try:
            result = self._cut(reason, now) if cut else self._final_result(reason, now)
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

    def _final_result(self, reason: str, now: float) -> Result:
        self.complete()
        sequence, metrics = self.sequence, self.sequence.metrics
        sequence.end(reason)
        sequence.sampler.release()
        metrics.num_output_tokens, metrics.finished = len(sequence.output), now
        tokens, logprobs, drafted = self._part(0, len(sequence.output))
        stop, reason = sequence.ending.stop if sequence.ending else None, sequence.finish_reason or reason
        ended = reason, metrics, logprobs, sequence.error, stop, drafted
        return Result(self._whole or "", tokens, *ended, _prompt_logprobs(sequence))

    def _cut(self, reason: str, now: float) -> Result:
        (count, text), metrics = self._published, deepcopy(self.sequence.metrics)
        metrics.num_output_tokens, metrics.finished = count, now
        tokens, logprobs, drafted = self._part(0, count)
        return Result(text, tokens, reason, metrics, logprobs, drafted=drafted)

    def _text(self, whole: bool = False) -> str:
        """Return the text that may be read; with `whole`, hold nothing back.

        If the tokenizer fails, the request fails and the text is as published before. A tokenizer's panic is not an
        Exception; it too must fail only this request.
        """
        try:
            if whole:
                self.sequence.detokenizer.finish()
            return self.sequence.detokenizer.text
        except BaseException as error:
            self.sequence.fail(error)
            return self._published[1]


def _prompt_logprobs(sequence: Sequence) -> list[TokenLogprobs | None] | None:
    """Return the log-probabilities of a prompt's tokens as far as it was read; None if they are not asked for."""
    return None if sequence.params.prompt_logprobs is None else list(sequence.prompt_logprobs)
