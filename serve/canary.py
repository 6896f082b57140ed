"""A canary: a share of a model's requests runs as the candidate, which is rolled back if it is worse than the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from .arms import CanaryOptions, Draw
from .comparison import arms_of, scorer_of
from .fields import Sampling
from .generation import Generation
from .judge import Judge
from .logs import RequestLog
from .models import Models, ServedModel
from .observation import observed
from .scoring import Score


class Arms:
    """One server's side of a canary: which requests take part, under which key, and what they showed.

    It concerns the first model that is not the candidate.
    """

    def __init__(self, models: Models, options: CanaryOptions, log: RequestLog, tenants: int) -> None:
        """Find both arms.

        Args:
            models: The served models.
            options: What is compared, and how.
            log: The server's log.
            tenants: Number of API keys.

        Raises:
            OptionError: If an option does not fit the models.
        """
        self.options, self._tenants = options, tenants
        self.baseline, self.candidate = arms_of(models.all, options)
        self.scorer = scorer_of(self.baseline, self.candidate, options, log)

    def concerns(self, served: ServedModel, body: Sampling) -> bool:
        """Return whether a request takes part; one that chooses its own drafting does not, unless models differ."""
        return served is self.baseline and not (self._asks(body) and not self.options.model)

    def placed(self, body: Sampling, candidate: bool) -> tuple[ServedModel, str | None]:
        """Return the model of an arm's request, and its speculation; None: as it asks."""
        way = None if self._asks(body) else self.options.speculation(candidate)
        return self.candidate if candidate else self.baseline, way

    def _asks(self, body: Sampling) -> bool:
        return (body.speculation, body.disable_spec_decode, body.num_speculative_tokens) != (None, None, None)

    def key(self, body: Sampling, tenant: str | None) -> str | None:
        """Return the key by which a request keeps its arm, if any: session, else user, else one of several API keys."""
        if self.options.sticky == "request":
            return None
        for kind, name in (("session", body.session), ("user", body.user)):
            if name is not None:
                return f"{tenant}\0{kind}\0{name}"
        return tenant if self._tenants > 1 else None

    def score(self, generation: Generation, draw: Draw, tell: Callable[[Score], None]) -> None:
        """Have the request's first text scored under the baseline, if it counts and texts are scored."""
        result = generation.results.get(0)
        if result and draw.fresh and self.scorer:
            self.scorer.offer(generation.prompts[0], result.token_ids, tell)


class Canary(Judge):
    """A `Watcher` with a judge of its own: the canary of one server."""

    def __init__(
        self,
        models: Models,
        options: CanaryOptions,
        log: RequestLog,
        tenants: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Go on from the saved state, or begin; see `Arms` and `Judge`."""
        self._arms = Arms(models, options, log, tenants)
        self.baseline, self.candidate = self._arms.baseline, self._arms.candidate
        self._scorer = self._arms.scorer
        super().__init__(self.baseline.name, options, self._scorer is not None, log, clock)

    async def arm(
        self, served: ServedModel, body: Sampling, tenant: str | None
    ) -> tuple[ServedModel, str | None, Draw | None]:
        """See `assign`."""
        return self.assign(served, body, tenant)

    def assign(
        self, served: ServedModel, body: Sampling, tenant: str | None
    ) -> tuple[ServedModel, str | None, Draw | None]:
        """Return the model for a request, its speculation (None: as it asks), and its draw if it counts."""
        if not self._arms.concerns(served, body):
            return served, None, None
        candidate, draw = self.draw(self._arms.key(body, tenant))
        return *self._arms.placed(body, candidate), draw

    def ended(self, generation: Generation) -> None:
        """See `Watcher`."""
        draw = generation.draw
        if draw is None:
            return
        values = observed(generation)
        if values and draw.number >= self._next:
            self._arms.score(generation, draw, lambda score: self.note_score(draw, score))
        self.note(draw, values)

    async def run(self, *beside: Coroutine[Any, Any, None]) -> None:
        """See `Watcher`; weighs ended requests, scores texts, takes steps, and saves the state."""
        scoring = [self._scorer.run()] if self._scorer else []
        await super().run(*scoring, *beside)
