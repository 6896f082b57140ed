"""The engine: load a bundle, generate or stream."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.backends.cpu.cores import cores
from specbuild.runtime.backends.executor import ON_GPU
from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import Manifest
from specbuild.runtime.decoding.host_loop import Loop
from specbuild.runtime.drafting.model import DrafterName
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.metrics import RunStats
from specbuild.runtime.requests.result import Chunk, Result
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.requests.tokenizer import Prompt, Tokenizer
from specbuild.runtime.requests.validation import Errors, Params, Prompts, Validator, params_list
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits
from specbuild.runtime.speculation.policy import Policy

from .handle import Handle
from .health import Health, Usage
from .observer import Observer
from .scheduler import Scheduler
from .window import Window

MAX_WAITING = 256


class Engine:
    """A loaded bundle, to be used from any number of threads; a context manager, or `close()` it."""

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        loop: Loop,
        batch_size: int,
        max_waiting: int = MAX_WAITING,
        clock: Callable[[], float] = time.perf_counter,
        policy: Policy | None = None,
        on_finish: Callable[[Result], object] | None = None,
    ) -> None:
        """`on_finish` is given each request's result, one after another, on a thread of its own.

        What it raises is logged, and where it falls behind results are dropped: see `Usage.dropped_results`.
        """
        self.manifest, self.tokenizer, self.batch_size = manifest, tokenizer, batch_size
        self._loop, self._validator = loop, Validator(manifest, tokenizer, clock, loop.check, policy)
        observer = Observer(on_finish) if on_finish else None
        self.scheduler = Scheduler(loop, batch_size, max_waiting, clock, observer)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        drafter: DrafterName | None = None,
        batch_size: int = 1,
        threads: int | None = None,
        draft_threads: int | None = None,
        max_waiting: int = MAX_WAITING,
        resident: bool = False,
        gpu_weights_percent: float | None = None,
        prefix_caching: bool = True,
        kv_cache_tokens: int | None = None,
        limits: Limits = NO_LIMITS,
        overlap: bool | None = None,
    ) -> Engine:
        """Load a bundle, checking its files' hashes meanwhile.

        drafter: "model", "ngram", or None for both (lookup where the text repeats itself, else the model).
        batch_size: how many sequences share a step. threads: of the target, all cores by default; draft_threads: the
        draft's own, one by default. max_waiting: requests in the queue at most. prefix_caching: a prompt that begins
        as a text in a cache does is read from there on.

        On a CPU alone yet: limits, what rounds may draft, whatever requests ask for; overlap, the draft model drafts on
        while the target verifies, by default where tuning found that it pays.

        On a GPU alone: resident, rounds follow each other without the host (docs/device-loop.md); gpu_weights_percent,
        0 … 1 of the target's weights are on the GPU, where its engine was built to stream the others; kv_cache_tokens,
        in paged caches, of all texts together, batch_size times the longest by default.

        Raises BundleError, OptionError, and ExecutionError where there is no GPU to run on.
        """
        bundle = Bundle.open(path)
        manifest = bundle.manifest
        if drafter == "model" and "draft" not in manifest.models:
            raise OptionError(f"{path} was built without a draft: use the ngram drafter, or build it with --draft")
        if drafter not in (None, "model", "ngram"):
            raise OptionError(f"unknown drafter {drafter!r}: use model or ngram")
        if type(batch_size) is not int or not 1 <= batch_size <= manifest.max_batch_size:
            raise OptionError(
                f"batch size {batch_size} is not in 1…{manifest.max_batch_size}, what {path} was built "
                "for: build it with --max-batch-size"
            )
        max_threads = max(64, os.cpu_count() or 1)
        for count in (threads, draft_threads):
            if count is not None and (type(count) is not int or not 1 <= count <= max_threads):
                raise OptionError(f"threads must be 1…{max_threads}, not {count}")
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < 1:
            raise OptionError(f"max_waiting must be a whole number of at least 1, not {max_waiting!r}")
        if gpu_weights_percent is not None and not 0 <= gpu_weights_percent <= 1:
            raise OptionError(f"gpu_weights_percent is of 0…1, not {gpu_weights_percent}")
        memory_plan.pages(manifest, batch_size, kv_cache_tokens)
        if manifest.backend in ON_GPU:
            if threads is not None or draft_threads is not None:
                raise OptionError(f"{path} runs on a GPU: threads are for bundles that run on a CPU")
            if limits != NO_LIMITS or overlap:
                raise OptionError(f"{path} runs on a GPU, which knows no limits and no overlap yet: load without")
            from .load_gpu import load_loop

            placed = gpu_weights_percent, kv_cache_tokens
            loop: Loop = load_loop(bundle, drafter, batch_size, resident, *placed)
            loop.prefix_caching = prefix_caching
            return cls(manifest, _tokenizer(bundle), loop, batch_size, max_waiting)
        if resident or gpu_weights_percent is not None:
            raise OptionError(
                f"{path} runs on a CPU: resident and gpu_weights_percent are for bundles that run on a GPU"
            )
        from .load_cpu import load_loop as load_cpu_loop

        with bundle.verifying():
            tokenizer = _tokenizer(bundle)
            loop, policy = load_cpu_loop(
                bundle, drafter, batch_size, threads or cores(), draft_threads or 1, limits, overlap
            )
        loop.prefix_caching = prefix_caching
        return cls(manifest, tokenizer, loop, batch_size, max_waiting, policy=policy)

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
    def notes(self) -> list[str]:
        """What runs otherwise than it should: steps that could not be captured in a CUDA graph, and why."""
        return self._loop.notes

    @property
    def cache_bytes(self) -> int:
        """Bytes of both caches."""
        return self._loop.cache_bytes

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
        """Cancel what is left, and free the models and the caches."""
        self.scheduler.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tokenizer(bundle: Bundle) -> Tokenizer:
    manifest = bundle.manifest
    template = bundle.path(manifest.chat_template) if manifest.chat_template else None
    return Tokenizer(bundle.path(manifest.tokenizer), template, manifest.special_tokens)
