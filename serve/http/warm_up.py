"""Warm-up: one request of each kind before a server is ready, and how fast plain decoding was in it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec

from specbuild.runtime import Chat, Engine, SamplingParams
from specbuild.runtime.errors import PromptError

SHORT, LONG = 8, 256  # tokens of the prompts
TOKENS, MEASURED = 4, 16  # tokens of a text, and of the one that is timed
NODES = 4  # drafted in a round by the kind that drafts in every round


def warm_up(engine: Engine) -> float | None:
    """Run a request of each kind, and a full batch; return the tokens a second of the last, which decodes plainly.

    They are background requests, which are in no metric and teach no session, and share no cached prompt. None: the
    model's texts are too short to tell. Raises the error of a request that fails.
    """
    if engine.tokenizer.chats:
        with suppress(PromptError):  # of a template that is wrong or takes no such chat, as each chat will be told
            engine.encode(Chat([{"role": "user", "content": "x"}]))
    quiet = SamplingParams(max_new_tokens=TOKENS, background=True, seed=0, cache_salt=secrets.token_hex(16))
    short, long = (_prompt(engine, size) for size in (SHORT, LONG))
    _rate(engine, [long], quiet)
    for params in _kinds(engine, quiet):
        _rate(engine, [short], params)
    _rate(engine, [short] * engine.batch_size, quiet)
    return _rate(engine, [short], replace(quiet, max_new_tokens=MEASURED, speculation="off", ignore_eos=True))


def _kinds(engine: Engine, quiet: SamplingParams) -> Iterator[SamplingParams]:
    limit = engine.limits.max_draft_tokens
    nodes = min(NODES, engine.manifest.buckets[-1] - 1, NODES if limit is None else limit)
    for temperature in (0.0, 1.0):
        for speculation in ("off", "auto", *([f"chain:{nodes}"] if nodes > 0 else [])):
            yield replace(quiet, temperature=temperature, speculation=speculation, ignore_eos=True)
    if find_spec("llguidance") and engine.manifest.eos_token_ids:
        yield replace(quiet, structured_outputs={"regex": "[a-z]+"})


def _prompt(engine: Engine, size: int) -> list[int]:
    """Return a prompt of so many tokens, or of fewer if the model or the caches have no room."""
    longest = min(engine.max_model_len, engine.usage.cache_capacity_tokens)
    vocabulary = engine.manifest.models["target"].vocab_size
    return [token % vocabulary for token in range(max(min(size, longest // 2), 1))]


def _rate(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> float | None:
    """Run requests; return the last one's tokens a second after its first; None if it has only one. Raises an error."""
    results = engine.generate(list(prompts), params)
    for result in results:
        if result.error:
            raise result.error
    metrics = results[-1].metrics
    return 1 / metrics.tpot if metrics and metrics.tpot else None
