"""A canary's arms: its options, the two ways to serve that it compares, and which requests run as the candidate."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from specbuild.runtime import TreeSpec
from specbuild.runtime.errors import OptionError, shown
from specbuild.serve.option_types import check_types
from specbuild.serve.request.fields import Sampling
from specbuild.serve.request.generation import Draw
from specbuild.serve.request.models import Models, ServedModel

METRICS = ("ttft", "tokens_per_second", "errors")
KEYS = 16_384  # maximum keys whose first request is remembered; beyond that the oldest counts as new again


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOptions:
    """Options of a canary.

    Args:
        candidate: "speculation=auto", "speculation=TREE" or "speculation=off", compared with speculation off or, for
            the last, on; or "model=NAME", another served bundle.
        weight: Percent of requests that run as the candidate.
        action: Whether proven harm rolls the candidate back.
        ignore: Metrics that are not compared.

    Raises:
        OptionError: If a value is wrong.
    """

    candidate: str
    weight: Annotated[float, Meta(gt=0, lt=100)] = 10.0
    action: Literal["rollback", "none"] = "rollback"
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        kind, _, value = self.candidate.partition("=")
        if kind not in ("speculation", "model") or not value:
            forms = "is speculation=auto, speculation=off, speculation=TREE or model=NAME"
            raise OptionError(f"canary {forms}, not {shown(self.candidate)}")
        if unknown := {*self.ignore} - {*METRICS}:
            raise OptionError(f"canary_ignore is of {', '.join(METRICS)}, not {shown(min(unknown))}")
        if not {*METRICS} - {*self.ignore}:
            raise OptionError("canary_ignore leaves nothing to compare: ignore fewer metrics")

    @property
    def model(self) -> str | None:
        """Name of the candidate if it is another bundle, else None."""
        return self.candidate.removeprefix("model=") if self.candidate.startswith("model=") else None

    @property
    def baseline(self) -> str:
        """Return what the candidate is compared with, written as a candidate is."""
        if self.model:
            return "the first other model"
        return "speculation=auto" if self.candidate == "speculation=off" else "speculation=off"

    def speculation(self, candidate: bool) -> str | None:
        """Return how an arm's requests are drafted for; None: as they ask."""
        if self.model:
            return None
        return (self.candidate if candidate else self.baseline).removeprefix("speculation=")


class Arms:
    """Both arms of a canary, and the draws between them. It concerns the first model that is not the candidate."""

    def __init__(self, models: Models, options: CanaryOptions) -> None:
        """Find both arms; raises OptionError if an option does not fit the models."""
        self._options, self._seen = options, OrderedDict[str, None]()
        self.baseline, self.candidate = _arms(models.all, options)

    def concerns(self, served: ServedModel, body: Sampling) -> bool:
        """Return whether a request takes part; one that chooses its own drafting does not, unless models differ."""
        return served is self.baseline and (self._options.model is not None or not _chooses(body))

    def placed(self, candidate: bool) -> tuple[ServedModel, str | None]:
        """Return the model of an arm's request, and its speculation; None: as it asks."""
        return self.candidate if candidate else self.baseline, self._options.speculation(candidate)

    def draw(self, body: Sampling, tenant: str | None) -> Draw:
        """Draw a request's arm; between two bundles a session, else a user, keeps its own and counts once."""
        share, name = self._options.weight / 100, body.session or body.user
        if name is None or not self._options.model:
            return Draw(random.random() < share)
        key = hashlib.sha256(f"{self._options.candidate}\0{tenant}\0{name}".encode()).hexdigest()
        fresh = key not in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        while len(self._seen) > KEYS:
            self._seen.popitem(last=False)
        return Draw(int(key[:13], 16) / 16**13 < share, fresh)


def _chooses(body: Sampling) -> bool:
    return (body.speculation, body.disable_spec_decode, body.num_speculative_tokens) != (None, None, None)


def _arms(
    models: tuple[ServedModel, ...] | list[ServedModel], options: CanaryOptions
) -> tuple[ServedModel, ServedModel]:
    """Return the models of baseline and candidate; raises OptionError."""
    if options.model is None:
        way = options.speculation(True)
        if way not in ("auto", "off"):
            TreeSpec.parse(str(way)).check(models[0].manifest.buckets[-1])
        return models[0], models[0]
    others = [model for model in models if options.model not in model.names]
    if len(others) == len(models) or not others:
        names = ", ".join(model.name for model in models)
        raise OptionError(f"canary model={options.model} is another model that is served, besides one of {names}")
    return others[0], next(model for model in models if options.model in model.names)
