"""`LoadOptions`: how a bundle is loaded and how its requests are served."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, TypedDict, get_type_hints

import msgspec
from msgspec import Meta

from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.backend import BACKENDS
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.drafting.model import DrafterName
from specbuild.runtime.errors import OptionError, shown
from specbuild.runtime.requests.result import Result
from specbuild.runtime.speculation.draft_limits import NO_LIMITS, Limits

MAX_WAITING = 256
STALL_TIMEOUT = 60.0  # seconds: many times the length of a round, even one with a long prefill chunk
MAX_THREADS = max(64, os.cpu_count() or 1)
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options for loading a bundle; validated on construction, and against a bundle by `check`; raises OptionError.

    drafter: "model", "ngram" (lookup in the text), or None for both: lookup where the text repeats itself, else the
    model.
    batch_size: number of slots, so of sequences that share a step; at most what the bundle was built for.
    max_waiting: maximum requests in the queue.
    prefix_caching: reuse cached rows for a prompt that begins like a cached text, and prefill only the rest.
    live_timings: correct the timing table's seconds by how long rounds take (docs/internals/policy.md).
    limits: limits on drafting, whatever requests ask for.
    on_finish: called with each request's result, on a thread of its own; what it raises is logged, and a slow one
    delays no request.
    stall_timeout: seconds after which a round counts as stuck, None for never. Then `Engine.health` says so, a warning
    is logged, requests that are cancelled or past their deadlines end without it, and `close` stops waiting for it.

    max_model_len: maximum tokens of a text, prompt and output together; by default what the bundle was built for.
    chat_template: text of a chat template that replaces the bundle's.

    Some are for bundles of some backends alone:

    threads: CPU threads, by default one per core.
    max_num_batched_tokens: maximum tokens of a step, at least two for each sequence; no text depends on it.
    resident: run rounds one after another on the GPU without the host between them (docs/internals/device-loop.md);
    None does where they can, true refuses a host on which they cannot.
    gpu_weights_percent: share of the target's weights kept on the GPU, 0 … 1; its engine streams the others.
    kv_cache_tokens: tokens that all texts have together in paged caches, by default batch_size times the longest text.
    """

    drafter: DrafterName | None = None
    batch_size: Annotated[int, Meta(ge=1)] = 1
    threads: Annotated[int, Meta(ge=1, le=MAX_THREADS)] | None = None
    max_waiting: Annotated[int, Meta(ge=1)] = MAX_WAITING
    resident: bool | None = None
    gpu_weights_percent: Share | None = None
    prefix_caching: bool = True
    kv_cache_tokens: int | None = None
    limits: Limits = NO_LIMITS
    on_finish: Callable[[Result], object] | None = None
    stall_timeout: Seconds | None = STALL_TIMEOUT
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    max_num_batched_tokens: Annotated[int, Meta(ge=2)] | None = None
    chat_template: str | None = None
    live_timings: bool = True

    def __post_init__(self) -> None:
        if self.drafter not in (None, "model", "ngram"):
            raise OptionError(f"unknown drafter {shown(self.drafter)}: use model or ngram")
        for name, kind in get_type_hints(LoadOptions, include_extras=True).items():
            try:
                if name not in ("limits", "on_finish"):
                    msgspec.convert(getattr(self, name), kind)
            except ValueError as error:
                raise OptionError(f"{name} cannot be {shown(getattr(self, name))}: {error}") from None
        rows, size = self.max_num_batched_tokens, self.batch_size
        if rows is not None and rows < 2 * size:
            raise OptionError(f"max_num_batched_tokens is {rows}: give at least 2 for each of {size} sequences")
        if not isinstance(self.limits, Limits):
            raise OptionError(f"limits must be Limits, not {shown(self.limits)}")
        if self.on_finish is not None and not callable(self.on_finish):
            raise OptionError(f"on_finish must be a function of a result, not {shown(self.on_finish)}")

    def check(self, bundle: Bundle) -> None:
        """Raise OptionError for an option that `bundle` or its backend does not support."""
        manifest, backend = bundle.manifest, bundle.manifest.descriptor
        for each in fields(self):
            able = [name for name, other in BACKENDS.items() if each.name in other.load_options]
            value = getattr(self, each.name)
            if able and backend.name not in able and value is not None and value is not False:
                raise OptionError(
                    f"{bundle.folder} runs on {backend.name}, which has no {each.name}: drop it "
                    f"({', '.join(able)} {'have' if len(able) > 1 else 'has'} it)"
                )
        if self.drafter == "model" and "draft" not in manifest.models:
            raise OptionError(f"{bundle.folder} has no draft: use the ngram drafter, or build it with --draft")
        if self.batch_size > manifest.max_batch_size:
            raise OptionError(
                f"batch size {self.batch_size} is not in 1…{manifest.max_batch_size}, what {bundle.folder} was built "
                "for: build it with --max-batch-size"
            )
        if self.max_model_len is not None and self.max_model_len > manifest.max_seq_len:
            raise OptionError(
                f"max_model_len {self.max_model_len} is more than {manifest.max_seq_len}, what {bundle.folder} was "
                "built for: build it with --max-seq-len"
            )
        memory_plan.pages(manifest, self.batch_size, self.kv_cache_tokens)


class LoadKeywords(TypedDict, total=False):
    """The fields of `LoadOptions` as keyword arguments of `load`."""

    drafter: DrafterName | None
    batch_size: int
    threads: int | None
    max_waiting: int
    resident: bool | None
    gpu_weights_percent: float | None
    prefix_caching: bool
    kv_cache_tokens: int | None
    limits: Limits
    on_finish: Callable[[Result], object] | None
    stall_timeout: float | None
    max_model_len: int | None
    max_num_batched_tokens: int | None
    chat_template: str | None
    live_timings: bool
