"""`Engine`: a bundle loaded to generate or stream text."""

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
from specbuild.runtime.errors import OptionError
from specbuild.runtime.requests.result import Chunk, Result
from specbuild.runtime.requests.sequence import Sequence
from specbuild.runtime.requests.tokenizer import Prompt, Tokenizer
from specbuild.runtime.requests.validation import Errors, Params, Prompts, Validator, params_list
from specbuild.runtime.sampling.constraint import Constraint
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.sampling.structured import StructuredOutputs
from specbuild.runtime.speculation.controller import Controller

from .composition import compose
from .engine_view import EngineView
from .handle import Handle
from .load_options import LoadKeywords, LoadOptions
from .observer import Observer
from .receipt import Origin, Receipt, ReceiptClass
from .replay import Replay, replay
from .scheduler import Scheduler
from .window import Window

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULTS = LoadOptions()


class Engine(EngineView):
    """A loaded bundle that serves any number of threads; use it as a context manager, or `close()` it.

    An engine dropped without that closes itself with a ResourceWarning. Requests raise PromptError or OptionError if
    they cannot run, and EngineClosedError once the engine closes or drains, or in a child process forked after loading.

    Example:
        from specbuild import Engine, SamplingParams

        with Engine.load("pycode.bundle", batch_size=2) as engine:
            print(engine.generate("def main(", SamplingParams(max_new_tokens=64))[0].text)
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        loop: Loop,
        batch_size: int,
        options: LoadOptions = DEFAULTS,
        clock: Callable[[], float] = time.perf_counter,
        controller: Controller | None = None,
        name: str = "an engine",
    ) -> None:
        """Serve a loop. Of `options` only max_waiting, max_model_len, on_finish and stall_timeout are used."""
        self.name, self.manifest, self.tokenizer, self.batch_size = name, manifest, tokenizer, batch_size
        self._loop = loop
        self._validator = Validator(manifest, tokenizer, loop.check, controller, loop.trunk, options.max_model_len)
        self.timings = controller.cost.table if controller else None  # None: the bundle was never tuned
        self._cost = controller.cost if controller else None
        observer = Observer(options.on_finish) if options.on_finish else None
        self.scheduler = Scheduler(loop, batch_size, options.max_waiting, clock, observer, options.stall_timeout)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], options: LoadOptions = DEFAULTS, **given: Unpack[LoadKeywords]
    ) -> Engine:
        """Load a bundle, checking its hashes.

        Args:
            path: The bundle's folder.
            options: How to load the bundle and serve requests.
            **given: Fields of `LoadOptions`; they override those of `options`.

        Raises:
            BundleError: The bundle is damaged, of another version, or not for this machine.
            OptionError: The bundle does not have what an option asks for.
            ExecutionError: The GPU that it was built for is not there, or memory ran out.
        """
        bundle, options = Bundle.open(path), replace(options, **given)
        parts = compose(bundle, options)
        made = bundle.manifest, parts.tokenizer, parts.loop, options.batch_size, options
        return cls(*made, controller=parts.controller, name=str(bundle.folder))

    def generate(self, prompts: Prompts, params: Params = None, *, errors: Errors = "raise") -> list[Result]:
        """Decode every prompt; return results in the prompts' order, the n samples of a prompt one after another.

        Args:
            prompts: A text, a list of token ids, a Chat or its messages; or a list of such prompts.
            params: Sampling parameters for all prompts, or a list with one for each; None: the defaults.
            errors: "raise" PromptError or OptionError before anything runs, or "return" them as the results of their
                prompts. Errors while a request runs are always in its result.
        """
        with closing(self._chunks(*self.requests(prompts, params, errors), each_round=False)) as chunks:
            results = {(chunk.index, chunk.sample): chunk.result for chunk in chunks if chunk.result}
        return [results[key] for key in sorted(results)]

    def stream(self, prompts: Prompts, params: Params = None, *, errors: Errors = "raise") -> Iterator[Chunk]:
        """Yield the output of `generate` in chunks as the texts grow; closing the iterator cancels the rest.

        Args:
            prompts: As for `generate`.
            params: As for `generate`.
            errors: As for `generate`; an error that is returned is a chunk with its result.
        """
        return self._chunks(*self.requests(prompts, params, errors), each_round=True)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, wait: bool = True) -> Handle:
        """Queue one sample of one prompt and return its handle at once, or once there is room in a full queue.

        Args:
            prompt: A text, a list of token ids, a Chat or its messages.
            params: Sampling parameters with n=1; None: the defaults.
            wait: Whether to wait for room; False raises QueueFullError instead.
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
        """Return the target's logits after a text, `float32[V]`; for measuring, see `text_logits`.

        Args:
            token_ids: The text, at least one token.
        """
        last: NDArray[np.float32] = self.text_logits(token_ids, 1)[0]
        return last

    def text_logits(self, token_ids: Seq[int], count: int | None = None) -> NDArray[np.float32]:
        """Return the target's logits after tokens of a text, `float32[count, V]`; for measuring.

        It waits for active requests and holds waiting ones.

        Args:
            token_ids: The text, at least one token.
            count: After how many of its last tokens; None: after all.
        """
        tokens = self._validator.check(list(token_ids))
        with self.scheduler.exclusive() as loop:
            return loop.logits(tokens, len(tokens) if count is None else count)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: A text, a list of token ids, a Chat or its messages; PromptError if it cannot be used.
        """
        return self._validator.check(self._validator.encode(prompt))

    def constraint(self, outputs: StructuredOutputs) -> Constraint:
        """Compile a structured output in this thread, before the requests that have it; keep it until they have begun.

        Args:
            outputs: The structured output; OptionError if it cannot be compiled within the limits.
        """
        return self._validator.constraint(outputs)

    def known_constraint(self, outputs: StructuredOutputs) -> Constraint | None:
        """Return what `constraint` would if it need not compile, without waiting; else None.

        Args:
            outputs: The structured output.
        """
        return self._validator.known_constraint(outputs)

    def decode(self, token_ids: Seq[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens.

        Args:
            token_ids: The tokens.
            skip_special_tokens: Whether to leave special tokens out.
        """
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    def receipt(self, prompt_token_ids: Seq[int], params: SamplingParams, result: Result) -> Receipt:
        """Return a record of what a result of this engine was made from and by, so that it can be decoded again.

        Args:
            prompt_token_ids: The prompt's token ids; OptionError if the result is of a prompt of another length.
            params: The parameters as they were given; OptionError if they have a constraint.
            result: One sample's result; OptionError if it was refused before it ran.
        """
        return Receipt.of(self._origin, prompt_token_ids, params, result)

    def replay(self, receipt: Receipt, prompt: Prompt, *, any_class: bool = False) -> Replay:
        """Decode a receipt's text again, plainly and with the bundle's speculation, and compare; raise what fails.

        Args:
            receipt: The receipt; BundleError if it is of another bundle.
            prompt: The prompt that the receipt was made for; PromptError if it is another one.
            any_class: Whether to try a receipt of another exactness class; False raises OptionError for it.
        """
        receipt.check_origin(self._origin, any_class)
        return replay(self.submit, self._origin, receipt, self.encode(prompt))

    @cached_property
    def _origin(self) -> Origin:
        found = self._loop.exactness
        here = ReceiptClass(found.rows, found.sequence_rows, found.digest) if found else None
        return Origin(self.manifest.digest, here)

    def requests(self, prompts: Prompts, params: Params, errors: Errors) -> tuple[list[Sequence], list[Chunk]]:
        """Return the sequences that `generate` would run, and a chunk for each prompt that cannot run.

        Args:
            prompts: As for `generate`.
            params: As for `generate`.
            errors: As for `generate`.
        """
        self.scheduler.check_open()
        return self._validator.requests(prompts, params, errors)

    def window(self, sequences: Seq[Sequence], wake: Callable[[], None], each_round: bool) -> Window:
        """Return a window over sequences: as many are submitted as keep every slot busy.

        Args:
            sequences: What `requests` returned.
            wake: Called, on any thread, when the window has something new.
            each_round: Whether that is every round, or only when a sequence ends.
        """
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

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, finish those under way, then close; return whether all of them finished.

        Every prompt of a `generate` or `stream` under way is finished too, so a stream that nobody reads is waited for.

        Args:
            timeout: Seconds after which what is left is cancelled; None: never.
        """
        return self.scheduler.drain(timeout)

    def close(self) -> None:
        """Cancel what is left, wait for the round under way unless it is stuck, and free the models and the caches."""
        self.scheduler.close()
        self._validator.grammars.close()

    def __del__(self) -> None:
        scheduler = getattr(self, "scheduler", None)  # absent if `__init__` failed
        if scheduler and scheduler.drop():
            told = f"{self.name} was dropped without close(), and its requests cancelled: use `with`, or close it"
            warnings.warn(told, ResourceWarning, stacklevel=2, source=self)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
