"""Scores: log-probabilities of emitted tokens by a model's own logits, computed while its engine is idle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specbuild.measure.divergence import kl
from specbuild.runtime import Engine
from specbuild.runtime.errors import EngineClosedError
from specbuild.runtime.sampling.logprobs import log_softmax

from .logs import RequestLog, error_of
from .models import ServedModel

WAITING = 64  # texts; more are dropped
LOGITS = 1 << 26  # bytes of a text's logits; tokens beyond are not scored


@dataclass(frozen=True, slots=True)
class Score:
    """A text under a model: means over its tokens, in nats. divergence: KL(this model ‖ another), if computed."""

    logprob: float
    entropy: float
    divergence: float | None


@dataclass(frozen=True, slots=True)
class _Text:
    prompt: list[int]
    tokens: list[int]
    tell: Callable[[Score], None]


class Scorer:
    """Scores texts under `model` in idle time, and how far `other` diverges from it. For one event loop's thread.

    A request that comes meanwhile waits for at most one text's logits of one model.
    """

    def __init__(self, model: ServedModel, log: RequestLog, other: ServedModel | None = None) -> None:
        self._model, self._other, self._log = model, other, log
        self._waiting = asyncio.Queue[_Text](WAITING)

    def offer(self, prompt: list[int], tokens: list[int], tell: Callable[[Score], None]) -> bool:
        """Queue a text, unless it is empty; its score goes to `tell` some time. Return whether there was room."""
        if not tokens or self._waiting.full():
            return False
        self._waiting.put_nowait(_Text(prompt, tokens, tell))
        return True

    async def run(self) -> None:
        """Score texts until cancelled or until an engine closes."""
        loop = asyncio.get_running_loop()
        models = [self._model, *([self._other] if self._other else [])]
        while True:
            text = await self._waiting.get()
            while busy := [model.admission for model in models if model.admission.requests]:
                await busy[0].idle.wait()  # a request may have come before this task resumed
            try:
                text.tell(await loop.run_in_executor(None, self._score, text))
            except EngineClosedError:
                return
            except Exception as error:  # affects this text only
                self._log.event("warning", "a text could not be scored", model=self._model.name, **error_of(error))

    def _score(self, text: _Text) -> Score:
        other = self._other.engine.engine if self._other else None
        return score(self._model.engine.engine, text.prompt, text.tokens, other)


def score(engine: Engine, prompt: Sequence[int], tokens: Sequence[int], other: Engine | None = None) -> Score:
    """Score a text's tokens, at most as many as LOGITS allows; raises the errors of `Engine.text_logits`.

    Args:
        engine: The model that scores.
        prompt: The text's prompt.
        tokens: The text's tokens.
        other: A model whose divergence is computed; None: none is.
    """
    row = 4 * engine.manifest.models["target"].vocab_size
    given = list(tokens[: max(LOGITS // row, 1)])
    whole = [*prompt, *given][:-1]
    logits = engine.text_logits(whole, len(given))
    rows = log_softmax(logits)
    chances = np.exp(rows)
    entropy = -np.where(chances > 0, chances * np.where(chances > 0, rows, 0.0), 0.0).sum(axis=1)
    logprob = float(rows[np.arange(len(given)), given].mean())
    divergence = float(kl(logits, other.text_logits(whole, len(given))).mean()) if other else None
    return Score(logprob, float(entropy.mean()), divergence)
