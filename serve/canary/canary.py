"""A canary: a share of a model's requests runs as the candidate, which is rolled back if it is worse than the rest."""

from __future__ import annotations

import time
from collections.abc import Callable

from specbuild.serve.request.fields import Sampling
from specbuild.serve.request.generation import Draw, Generation
from specbuild.serve.request.models import Models, ServedModel
from specbuild.serve.request_outcome import observed
from specbuild.serve.telemetry.logs import RequestLog

from .assignment import CanaryOptions
from .comparison import arms_of
from .verdicts import Judge


class Arms:
    """One server's side of a canary: which requests take part, under which key, and what they showed.

    It concerns the first model that is not the candidate.
    """

    def __init__(self, models: Models, options: CanaryOptions, tenants: int) -> None:
        """Find both arms.

        Args:
            models: The served models.
            options: What is compared, and how.
            tenants: Number of API keys.

        Raises:
            OptionError: If an option does not fit the models.
        """
        self.options, self._tenants = options, tenants
        self.baseline, self.candidate = arms_of(models.all, options)

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
        self._arms = Arms(models, options, tenants)
        self.baseline, self.candidate = self._arms.baseline, self._arms.candidate
        super().__init__(self.baseline.name, options, log, clock)

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
        if generation.draw:
            self.note(generation.draw, observed(generation))
