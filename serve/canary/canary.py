"""A canary: a share of a model's requests runs as the candidate, which is rolled back if it is worse than the rest."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from specbuild.measure.trial import Metric, Trial
from specbuild.serve.request.fields import Sampling
from specbuild.serve.request.generation import Draw, Generation
from specbuild.serve.request.models import Models, ServedModel
from specbuild.serve.telemetry.logs import RequestLog

from .assignment import Arms, CanaryOptions
from .request_outcome import outcome_of

Phase = Literal["running", "promoted", "rolled back"]
ALPHA = 0.05  # maximum probability that a candidate that does no harm is rolled back
_METRICS = (Metric("ttft"), Metric("tokens_per_second", "lower"), Metric("errors", share=True))


class Canary:
    """A `Watcher` that draws arms, weighs what they showed, and rolls back. For the event loop's thread only."""

    def __init__(self, models: Models, options: CanaryOptions, log: RequestLog) -> None:
        """Find both arms; raises OptionError if an option does not fit the models."""
        self.options, self._log, self._arms = options, log, Arms(models, options)
        self.baseline, self.candidate = self._arms.baseline, self._arms.candidate
        self.compares_texts = _tokenizer(self.baseline) == _tokenizer(self.candidate)
        self._ready = asyncio.Queue[tuple[bool, dict[str, float]]]()
        self._begin()

    def _begin(self) -> None:
        metrics = [metric for metric in _METRICS if metric.name not in self.options.ignore]
        self.trial = Trial(metrics, self.options.weight / 100, ALPHA)
        self.phase: Phase = "running"
        self.requests, self.texts = [0, 0], {"equal": 0, "different": 0}  # requests: baseline, candidate

    def assign(
        self, served: ServedModel, body: Sampling, tenant: str | None
    ) -> tuple[ServedModel, str | None, Draw | None]:
        """Return the model for a request, its speculation (None: as it asks), and its draw if it counts."""
        if not self._arms.concerns(served, body):
            return served, None, None
        draw = self._arms.draw(body, tenant) if self.phase == "running" else None
        candidate = draw.candidate if draw else self.phase == "promoted"
        self.requests[candidate] += 1
        return *self._arms.placed(candidate), draw

    def ended(self, generation: Generation) -> None:
        """See `Watcher`."""
        values = outcome_of(generation) if generation.draw and generation.draw.fresh else None
        if generation.draw and values:
            self._ready.put_nowait((generation.draw.candidate, values))

    async def run(self) -> None:
        """Weigh what has ended, until cancelled; a failure rolls back."""
        try:
            while True:
                self._weigh(*await self._ready.get())
                self._ready.task_done()
                await asyncio.sleep(0)  # lets requests go first
        except Exception:
            self.turn("rolled back")
            raise

    async def settled(self) -> None:
        """Wait until everything that has ended is weighed; `run` must be running."""
        await self._ready.join()

    def _weigh(self, candidate: bool, values: dict[str, float]) -> None:
        """Add a request's values as evidence, and roll back if harm is proven by it and the options ask for that."""
        before = self.trial.harmful
        self.trial.add(candidate, values)
        if self.phase != "running" or not self.trial.harmful:
            return
        if not before:
            worst = max(self.trial.evidence(), key=lambda each: each.harm)
            names = {"metric": worst.metric, "means": worst.means, "n": worst.n, "e": self.trial.e}
            self._log.event("error", "the canary's candidate is worse", candidate=self.options.candidate, **names)
        if self.options.action == "rollback":
            self.turn("rolled back")

    def compared(self, outcome: Literal["equal", "different"]) -> None:
        """Count a text of the candidate that the baseline has decoded again; speculation may change none."""
        self.texts[outcome] += 1
        if outcome == "different" and not self.options.model and self.options.action == "rollback":
            self.turn("rolled back")

    def turn(self, phase: Phase) -> None:
        """Enter another phase; one that runs again begins anew."""
        if phase == "running":
            self._begin()
        self.phase = phase
        self._log.event("info", f"the canary is {phase}", model=self.baseline.name, candidate=self.options.candidate)

    @property
    def weight(self) -> float:
        """Percent of requests that run as the candidate now."""
        return {"promoted": 100.0, "rolled back": 0.0}.get(self.phase, self.options.weight)

    def view(self) -> dict[str, Any]:
        """Return the response of `GET /canary`."""
        return {
            "model": self.baseline.name,
            "candidate": self.options.candidate,
            "baseline": self.options.baseline,
            "phase": self.phase,
            "weight": self.weight,
            "action": self.options.action,
            "requests": {"baseline": self.requests[0], "candidate": self.requests[1]},
            "texts": self.texts,
            **self.trial.view(),
        }


def _tokenizer(model: ServedModel) -> str:
    """Return the digest of a model's tokenizer."""
    return model.manifest.files[model.manifest.tokenizer].sha256
