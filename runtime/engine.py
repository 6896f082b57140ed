"""The engine: load a bundle, generate or stream."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import backends
from .bundle import Bundle, Manifest
from .draft import Drafter, ModelDrafter
from .errors import EngineBusyError, OptionError, PromptError
from .loop import Loop
from .metrics import RequestMetrics, RunStats
from .mixed import MixedDrafter
from .ngram import NgramDrafter
from .sampling import Sampler, SamplingParams, fresh_seed
from .sequence import Sequence
from .tokenizer import Detokenizer, Tokenizer
from .tree import TreeSpec

Prompt = str | Seq[int] | Seq[dict[str, Any]]
DrafterName = Literal["model", "ngram"]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one prompt. `token_ids` hold the end-of-sequence token, `text` does not."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" (end of sequence or a stop string) or "length"
    metrics: RequestMetrics

    def to_dict(self) -> dict[str, Any]:
        """As `specbuild generate --json` prints it."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "metrics": self.metrics.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added to one prompt's output; the last chunk of a prompt carries its result."""

    index: int  # which prompt
    text: str  # complete characters only
    token_ids: list[int]
    result: Result | None


class Engine:
    """A loaded bundle. One generation at a time; use as a context manager, or `close()` it."""

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer, loop: Loop, batch_size: int) -> None:
        self.manifest, self.tokenizer, self.batch_size = manifest, tokenizer, batch_size
        self._loop = loop
        self._busy = threading.Lock()
        self._closed = False

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        drafter: DrafterName | None = None,
        batch_size: int = 1,
        threads: int | None = None,
        draft_threads: int = 1,
    ) -> Engine:
        """Load a bundle, checking its files' hashes meanwhile.

        drafter: "model", "ngram", or None for both (lookup where the text repeats itself, else the model).
        batch_size: how many sequences share a step. threads: of the target, all cores by default; the draft has
        its own. Raises BundleError and OptionError.
        """
        bundle = Bundle.open(path)
        manifest = bundle.manifest
        if drafter == "model" and "draft" not in manifest.models:
            raise OptionError(f"{path} was built without a draft: use the ngram drafter, or build it with --draft")
        if drafter not in (None, "model", "ngram"):
            raise OptionError(f"unknown drafter {drafter!r}: use model or ngram")
        if not 1 <= batch_size <= manifest.max_batch_size:
            raise OptionError(
                f"batch size {batch_size} is not in 1…{manifest.max_batch_size}, what {path} was built "
                "for: build it with --max-batch-size"
            )
        if (threads is not None and threads < 1) or draft_threads < 1:
            raise OptionError("threads must be at least 1")
        chunk = manifest.buckets[-1]
        with bundle.verifying():
            template = bundle.path(manifest.chat_template) if manifest.chat_template else None
            tokenizer = Tokenizer(bundle.path(manifest.tokenizer), template, manifest.special_tokens)
            target = _load_model(bundle, "target", batch_size, threads or _cores())
            drafting: Drafter = NgramDrafter()
            if drafter != "ngram" and "draft" in manifest.models:
                model = ModelDrafter(_load_model(bundle, "draft", batch_size, draft_threads), chunk)
                drafting = model if drafter == "model" else MixedDrafter(model)
        return cls(manifest, tokenizer, Loop(target, drafting, chunk, frozenset(manifest.eos_token_ids)), batch_size)

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Result]:
        """Decode every prompt; results in the prompts' order.

        A prompt is a text, a list of token ids, or a chat's messages; one alone is a list of one. Raises PromptError
        and OptionError before anything runs, EngineBusyError while another generation is under way.
        """
        results: dict[int, Result] = {}
        for chunk in self.stream(prompts, params):
            if chunk.result:
                results[chunk.index] = chunk.result
        return [results[index] for index in sorted(results)]

    def stream(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Iterator[Chunk]:
        """As `generate`, a chunk at a time as the text grows; closing the iterator abandons what is left."""
        listed = _prompt_list(prompts)
        each = _params_list(params, len(listed))
        sequences = [self._sequence(i, prompt, p) for i, (prompt, p) in enumerate(zip(listed, each, strict=True))]
        return self._run(deque(sequences))

    def logits(self, token_ids: Seq[int]) -> NDArray[np.float32]:
        """The target's logits after a text, `float32[V]`: for measuring, not for decoding."""
        if self._closed or not self._busy.acquire(blocking=False):
            raise EngineBusyError("the engine is closed, or generating already")
        try:
            return self._loop.logits(list(token_ids))
        finally:
            self._busy.release()

    def _sequence(self, index: int, prompt: Prompt, params: SamplingParams) -> Sequence:
        where, manifest = f"prompt {index + 1}", self.manifest
        vocab_size = manifest.models["target"].vocab_size
        try:
            tokens, tree = self.tokenizer.encode(prompt), self._tree(params.speculation)
            seed = fresh_seed() if params.seed is None else params.seed
            sampler = Sampler(params, seed, tokens, vocab_size)
        except PromptError as error:
            raise PromptError(f"{where}: {error}") from None
        except OptionError as error:
            raise OptionError(f"{where}: {error}") from None
        if not tokens:
            raise PromptError(f"{where} is empty: give at least one token")
        if len(tokens) >= manifest.max_seq_len:
            raise PromptError(
                f"{where} has {len(tokens)} tokens, this bundle holds {manifest.max_seq_len} with at "
                "least one of output: shorten it, or build with a larger --max-seq-len"
            )
        if not all(0 <= token < vocab_size for token in tokens):
            raise PromptError(f"{where} has a token id outside the vocabulary of {vocab_size}")
        return Sequence(
            index=index,
            tokens=tokens,
            params=params,
            sampler=sampler,
            tree=tree,
            detokenizer=Detokenizer(self.tokenizer, tokens, params.stop),
            metrics=RequestMetrics(len(tokens), seed, str(tree) if tree else "off"),
            limit=min(len(tokens) + params.max_new_tokens, manifest.max_seq_len),
        )

    def _tree(self, speculation: str) -> TreeSpec | None:
        if speculation == "off":
            return None
        text = self.manifest.default_tree if speculation == "auto" else speculation
        return TreeSpec.parse(text).check(self.manifest.buckets[-1])

    def _run(self, waiting: deque[Sequence]) -> Iterator[Chunk]:
        """Rounds until every sequence has ended; a freed slot takes the next one waiting."""
        if self._closed:
            raise EngineBusyError("the engine is closed: load the bundle again")
        if not self._busy.acquire(blocking=False):
            raise EngineBusyError("the engine is generating already: finish or close that generation first")
        active: list[Sequence] = []
        try:
            free = list(range(self.batch_size))
            while waiting or active:
                while waiting and free:
                    active.append(waiting.popleft())
                    active[-1].slot, active[-1].started = free.pop(0), time.perf_counter()
                before = [(len(s.output), s.detokenizer.text) for s in active]
                self._loop.round(active)
                now = time.perf_counter()
                for sequence, (count, text) in zip(active, before, strict=True):
                    if len(sequence.output) > count:
                        yield self._chunk(sequence, count, text, now - sequence.started)
                for sequence in [s for s in active if s.finish_reason]:
                    active.remove(sequence)
                    free.append(sequence.slot)
                    self._loop.release(sequence.slot)
        finally:
            for sequence in active:
                self._loop.release(sequence.slot)
            self._busy.release()

    def _chunk(self, sequence: Sequence, count: int, text: str, elapsed: float) -> Chunk:
        metrics, detokenizer, result = sequence.metrics, sequence.detokenizer, None
        if count == 0:
            metrics.ttft = elapsed
        if sequence.finish_reason:
            detokenizer.finish()
            metrics.e2el, metrics.num_output_tokens = elapsed, len(sequence.output)
            result = Result(detokenizer.text, sequence.output, sequence.finish_reason, metrics)
        return Chunk(sequence.index, detokenizer.text[len(text) :], sequence.output[count:], result)

    @property
    def stats(self) -> RunStats:
        """Where the time of all rounds since loading went."""
        return self._loop.stats

    @property
    def cache_bytes(self) -> int:
        """Bytes of both caches."""
        return self._loop.cache_bytes

    def close(self) -> None:
        """Free the models and the caches."""
        if not self._closed:
            self._closed = True
            self._loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load_model(bundle: Bundle, name: str, batch_size: int, threads: int) -> backends.Executor:
    """The smallest compiled graph that holds `batch_size` sequences."""
    model = bundle.manifest.models[name]
    compiled = min(int(size) for size in model.graphs if int(size) >= batch_size)
    spec = backends.ModelSpec(
        name=name,
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        capacity=model.capacity,
        max_nodes=bundle.manifest.buckets[-1],
        windows=tuple(model.windows),
    )
    graph = bundle.path(model.graphs[str(compiled)])
    return backends.load(bundle.manifest.backend, graph, spec, compiled, threads)


def _prompt_list(prompts: Any) -> list[Prompt]:
    """A list of prompts, from that or from a single one."""
    if isinstance(prompts, str) or not isinstance(prompts, list | tuple):
        return [prompts]
    single = bool(prompts) and all(isinstance(p, int | Mapping) and not isinstance(p, bool) for p in prompts)
    return [list(prompts)] if single else list(prompts)


def _params_list(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise OptionError(f"{len(params)} sampling parameters for {count} prompts: give one, or one for each")
    return list(params)
