"""The engine: load a bundle, generate or stream."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import Manifest
from specbuild.runtime.decoding.loop import Loop
from specbuild.runtime.errors import OptionError, shown
from specbuild.runtime.requests.metrics import RunStats
from specbuild.runtime.requests.result import Chunk, Result
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.requests.tokenizer import Prompt, Tokenizer
from specbuild.runtime.requests.validation import Errors, Params, Prompts, Validator, params_list
from specbuild.runtime.sampling.constraint import Constraint
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.sampling.structured import StructuredOutputs
from specbuild.runtime.speculation.draft_limits import Limits
from specbuild.runtime.speculation.policy import Policy

from .composition import compose
from .handle import Handle
from .health import Health, Usage
from .load_options import LoadKeywords, LoadOptions
from .observer import Observer
from .receipt import Origin, Receipt, ReceiptClass
from .replay import Replay, replay
from .scheduler import Scheduler
from .window import Window

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULTS = LoadOptions()


class Engine:
    """A loaded bundle, to be used from any number of threads; a context manager, or `close()` it.

    One that is dropped without that is closed, with a ResourceWarning. It belongs to the process that loaded it: in a
    forked child it raises EngineClosedError.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        loop: Loop,
        batch_size: int,
        options: LoadOptions = DEFAULTS,
        clock: Callable[[], float] = time.perf_counter,
        policy: Policy | None = None,
        name: str = "an engine",
    ) -> None:
        """Of the options those count that say how requests are served: max_waiting, on_finish and stall_timeout."""
        self.name, self.manifest, self.tokenizer, self.batch_size = name, manifest, tokenizer, batch_size
        self._loop = loop
        self._validator = Validator(manifest, tokenizer, loop.check, policy, loop.bound, options.max_model_len)
        self.timings = policy.timings if policy else None  # None: the bundle was never tuned
        self._live = policy.live if policy else None
        observer = Observer(options.on_finish) if options.on_finish else None
        self.scheduler = Scheduler(loop, batch_size, options.max_waiting, clock, observer, options.stall_timeout)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], options: LoadOptions = DEFAULTS, **given: Unpack[LoadKeywords]
    ) -> Engine:
        """Load a bundle, checking its files' hashes.

        The keywords are the fields of `LoadOptions`, and go before those of `options`. Raises BundleError, OptionError,
        and ExecutionError where there is no GPU to run on.
        """
        bundle, options = Bundle.open(path), replace(options, **given)
        parts = compose(bundle, options)
        made = bundle.manifest, parts.tokenizer, parts.loop, options.batch_size, options
        return cls(*made, policy=parts.policy, name=str(bundle.folder))

    def generate(self, prompts: Prompts, params: Params = None, *, errors: Errors = "raise") -> list[Result]:
        """Decode every prompt; results in the prompts' order, the n samples of one after another.

        A prompt is a text, a list of token ids, a Chat or its messages; one alone is a list of one. What is wrong with
        a prompt is raised before anything runs (PromptError, OptionError), or with errors="return" becomes its result;
        what goes wrong while running is always in the result. Raises EngineClosedError.
        """
        with closing(self._chunks(*self.requests(prompts, params, errors), each_round=False)) as chunks:
            results = {(chunk.index, chunk.sample): chunk.result for chunk in chunks if chunk.result}
        return [results[key] for key in sorted(results)]

    def stream(self, prompts: Prompts, params: Params = None, *, errors: Errors = "raise") -> Iterator[Chunk]:
        """As `generate`, a chunk at a time as the text grows; closing the iterator cancels what is left."""
        return self._chunks(*self.requests(prompts, params, errors), each_round=True)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, wait: bool = True) -> Handle:
        """Queue one sample of one prompt, and return at once unless the queue is full.

        Then it waits for room, or with wait=False raises QueueFullError. Raises PromptError, OptionError and
        EngineClosedError.
        """
        self.scheduler.check_open()
        (one,), entered = params_list(params, 1), threading.Event()
        if one.n > 1:
            raise OptionError(f"submit takes one sample, not n={one.n}: submit each with a seed, or use generate")
        (sequence,) = self._validator.samples(prompt, one)
        handle = self.scheduler.submit(sequence, entered.set, wait=wait)
        try:
            if not handle.queued:
                entered.wait()
        except BaseException:
            handle.cancel()
            raise
        return handle

    def logits(self, token_ids: Seq[int]) -> NDArray[np.float32]:
        """The target's logits after a text, `float32[V]`: for measuring, not for decoding.

        Waits for the requests that run, and holds the waiting ones. Raises PromptError and EngineClosedError.
        """
        last: NDArray[np.float32] = self.text_logits(token_ids, 1)[0]
        return last

    def text_logits(
        self, token_ids: Seq[int], count: int | None = None, nodes: int | None = None
    ) -> NDArray[np.float32]:
        """As `logits`, after each of the last `count` tokens, all by default: `float32[count, V]`.

        nodes: how many tokens a step computes at most.
        """
        tokens = self._validator.check(list(token_ids))
        with self.scheduler.exclusive() as loop:
            return loop.logits(tokens, len(tokens) if count is None else count, nodes)

    @property
    def max_model_len(self) -> int:
        """Tokens of a text at most, prompt and output."""
        return self._validator.max_model_len

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt that `generate` takes; raises PromptError."""
        return self._validator.check(self._validator.encode(prompt))

    def constraint(self, outputs: StructuredOutputs) -> Constraint:
        """What a structured output is compiled into, ahead of the requests that have it; keep it until they have begun.

        Takes as long as it takes, within limits, in the caller's thread; raises OptionError.
        """
        return self._validator.constraint(outputs)

    def decode(self, token_ids: Seq[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    def receipt(self, prompt_token_ids: Seq[int], params: SamplingParams, result: Result) -> Receipt:
        """What a result of this engine was made from and by, so that it can be decoded again.

        `params`: as they were given. Raises OptionError for parameters with a constraint, for a result of a prompt of
        another length, and for one that was refused before it ran.
        """
        return Receipt.of(self._origin, prompt_token_ids, params, result)

    def replay(self, receipt: Receipt, prompt: Prompt, *, any_class: bool = False) -> Replay:
        """Decode a receipt's text again, by plain decoding and by the bundle's speculation, and compare.

        Raises BundleError for another bundle, PromptError for another prompt, and OptionError for another exactness
        class, which `any_class` tries all the same; EngineClosedError, and what goes wrong while it is decoded.
        """
        receipt.check_origin(self._origin, any_class)
        return replay(self.submit, self._origin, receipt, self.encode(prompt))

    @cached_property
    def _origin(self) -> Origin:
        found = self._loop.exactness
        here = ReceiptClass(found.rows, found.sequence_rows, found.digest) if found else None
        return Origin(self.manifest.digest, here)

    def requests(self, prompts: Prompts, params: Params, errors: Errors) -> tuple[list[Sequence], list[Chunk]]:
        """What `generate` and `stream` would run, and the chunks of what cannot; see `Validator.requests`."""
        self.scheduler.check_open()
        return self._validator.requests(prompts, params, errors)

    def window(self, sequences: Seq[Sequence], wake: Callable[[], None], each_round: bool) -> Window:
        """A window over sequences: as many submitted as keep every slot busy."""
        return Window(self.scheduler, sequences, 2 * self.batch_size, wake, each_round)

    def _chunks(
        self, sequences: list[Sequence], refused: list[Chunk], each_round: bool
    ) -> Generator[Chunk, None, None]:
        yield from refused
        changed = threading.Event()
        window = self.window(sequences, changed.set, each_round)
        try:
            while window.pending:
                changed.clear()
                yield from window.chunks()
                if window.pending:
                    changed.wait()
        finally:
            window.cancel()

    @property
    def stats(self) -> RunStats:
        """Where the time of all rounds from loading until now went; it never changes, so ask again for later ones."""
        return self._loop.stats

    @property
    def correction(self) -> float:
        """What steps of the target take now over what the timing table says; 1 where there is no table."""
        return self._live.correction if self._live else 1.0

    @property
    def limits(self) -> Limits:
        """What rounds may draft; any thread may set others from the next round on, and no text depends on them.

        No request is refused for them. Raises OptionError for more nodes than it was loaded with (None: as many).
        """
        return self._loop.planner.now

    @limits.setter
    def limits(self, limits: Limits) -> None:
        if not isinstance(limits, Limits):
            raise OptionError(f"limits must be Limits, not {shown(limits)}")
        if limits.min_expected_speedup > 1 and not self.timings:
            raise OptionError(f"min_expected_speedup needs a tuned bundle: tune {self.name}")
        self._loop.planner.limit(limits)

    @property
    def notes(self) -> list[str]:
        """What runs otherwise than it should: steps that could not be captured in a CUDA graph, and why."""
        return self._loop.notes

    @property
    def exact(self) -> bool:
        """Whether one seed gives one text in every bit, whatever is drafted, what else runs and what ran before.

        Else a choice may be turned by rounding where its gap is below `manifest.exactness_bound`.
        """
        return self._loop.exactness is not None

    @property
    def cache_bytes(self) -> int:
        """Bytes of both caches."""
        return self._loop.cache_bytes

    @property
    def cached_texts(self) -> list[tuple[str | None, list[int]]]:
        """The `cache_salt` and the tokens of each text that a slot's cache holds."""
        return self._loop.cached_texts()

    @property
    def usage(self) -> Usage:
        """How many requests wait and run now, and how full the caches are."""
        return self.scheduler.usage(self.batch_size * self.manifest.max_seq_len)

    def health(self) -> Health:
        """Whether the engine makes rounds, and what it waits for; answers while a round hangs."""
        return self.scheduler.health()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, finish those there are, then close; whether all of them finished.

        Whatever a `generate` or `stream` has begun is finished too, so a stream that nobody reads is waited for. From
        now on requests raise EngineClosedError. After `timeout` seconds, for ever without, what is left is cancelled.
        """
        return self.scheduler.drain(timeout)

    def close(self) -> None:
        """Cancel what is left, wait for the round under way unless it is stuck, and free the models and the caches."""
        self.scheduler.close()
        self._validator.grammars.close()

    def __del__(self) -> None:
        scheduler = getattr(self, "scheduler", None)  # the making of it may have failed
        if scheduler and scheduler.drop():
            told = f"{self.name} was dropped without close(), and its requests cancelled: use `with`, or close it"
            warnings.warn(told, ResourceWarning, stacklevel=2, source=self)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
