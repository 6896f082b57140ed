"""The handle of a submitted request: its caller's end of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from specbuild.runtime.requests.result import Chunk, Result
from specbuild.runtime.requests.sequence import Sequence


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
        self._cancel = cancel
        self._ended = threading.Event()
        self._result: Result | None = None
        self._published = 0, ""  # what may be read: tokens, and their text
        self._taken = 0, 0  # what was: tokens, and characters
        self._wake: Callable[[], None] | None = None
        self._each_round = False

    @property
    def done(self) -> bool:
        """Whether there is a result."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result; what went wrong is in it, not raised. Raises TimeoutError after `timeout` seconds."""
        if not self._ended.wait(timeout) or self._result is None:
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
            changed.clear()
            chunk = self.take()
            if chunk:
                yield chunk
            if chunk and chunk.result:
                return
            changed.wait()

    def listen(self, wake: Callable[[], None], each_round: bool) -> None:
        """Have `wake` called when the request is queued and when it ends, and after each of its rounds if asked."""
        self._wake, self._each_round = wake, each_round

    def take(self) -> Chunk | None:
        """What is new since the last call; None where nothing is. With the result once there is one."""
        result = self._result  # before what is published: it is set after
        (start, shown), (stop, text), sequence = self._taken, self._published, self.sequence
        if stop == start and not result:
            return None
        self._taken = stop, len(text)
        logprobs = sequence.logprobs[start:stop] if sequence.params.logprobs is not None else None
        return Chunk(sequence.index, sequence.sample, text[shown:], sequence.output[start:stop], logprobs, result)

    def enter(self) -> None:
        """For the scheduler: the request is in the queue."""
        self.queued = True
        if self._wake:
            self._wake()

    def publish(self) -> None:
        """For the scheduler: a round has ended."""
        self._published = len(self.sequence.output), self._text()
        if self._each_round and self._wake:
            self._wake()

    def end(self, reason: str, now: float) -> None:
        """For the scheduler: make the result, whatever is wrong with its text. `now`: on the scheduler's clock."""
        sequence = self.sequence
        sequence.finish_reason = sequence.finish_reason or reason
        text, tokens, metrics = self._text(whole=True), sequence.output, sequence.metrics
        metrics.num_output_tokens, metrics.finished = len(tokens), now
        logprobs = sequence.logprobs[: len(tokens)] if sequence.params.logprobs is not None else None
        self._published, self.queued = (len(tokens), text), True
        self._result = Result(
            text, tokens, sequence.finish_reason, metrics, logprobs, sequence.error, sequence.stop_reason
        )
        self._ended.set()
        if self._tell:
            self._tell(self._result)
        if self._wake:
            self._wake()

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
