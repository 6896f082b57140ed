"""Arms: the options of a canary, and which requests run as its candidate."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from specbuild.runtime.errors import OptionError, shown
from specbuild.serve.request.generation import Draw

from . import canary_objectives as ceilings

Action = Literal["rollback", "none"]
Sticky = Literal["session", "request"]
METRICS = ("ttft", "tpot", "e2el", "errors", "cut", "tokens", "invalid", "acceptance")
KEYS = 16_384  # maximum keys whose first request is remembered; beyond that the oldest counts as new again


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryOptions:
    """Options of a canary.

    Args:
        candidate: "speculation=auto", "speculation=off", "speculation=TREE" or "model=NAME".
        baseline: "asked" (as requests ask) or "speculation=…".
        weight: Percent of requests that run as the candidate at first.
        step_weight: Percent that are added every interval.
        interval: Seconds between two steps.
        max_weight: Maximum percent.
        alpha: Maximum probability of a rollback if the candidate is no worse.
        margin: How much slower, as a share, a candidate may be and its verdict still be promote.
        action: Whether a verdict against the candidate is carried out without an operator.
        sticky: Whether a session keeps its arm.
        ignore: Metrics that decide nothing.
        objective: Ceilings for the candidate, independent of the baseline, see `ceilings.parse`.
        state: File from which a restart goes on; None: nothing is kept.

    Raises:
        OptionError: If a value is wrong.
    """

    candidate: str
    baseline: str = "asked"
    weight: float = 10.0
    step_weight: float = 10.0
    interval: float = 60.0
    max_weight: float = 50.0
    alpha: float = 0.05
    margin: float = 0.1
    action: Action = "rollback"
    sticky: Sticky = "session"
    ignore: tuple[str, ...] = ()
    objective: tuple[str, ...] = ()
    state: Path | None = None

    def __post_init__(self) -> None:
        kind, equals, value = self.candidate.partition("=")
        if kind not in ("speculation", "model") or not equals or not value:
            told = "is speculation=auto, speculation=off, speculation=TREE or model=NAME"
            raise OptionError(f"canary {told}, not {shown(self.candidate)}")
        if self.baseline != "asked" and not self.baseline.startswith("speculation="):
            raise OptionError(f"canary_baseline is asked or speculation=…, not {shown(self.baseline)}")
        if self.candidate == self.baseline:
            raise OptionError("canary and canary_baseline are the same: there is nothing to compare")
        if not 0 < self.weight <= self.max_weight < 100:
            raise OptionError(
                f"canary_weight is above 0 and at most canary_max_weight, which is below 100, not {shown(self.weight)} "
                f"of {shown(self.max_weight)}"
            )
        bounds = {"step_weight": (0, 100), "interval": (1, math.inf), "margin": (0.001, 10), "alpha": (1e-9, 0.5)}
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                told = f"{low:g}…{high:g}" if high < math.inf else f"at least {low:g}"
                raise OptionError(f"canary_{name} is {told}, not {shown(getattr(self, name))}")
        for value, known in ((self.action, Action), (self.sticky, Sticky)):
            if value not in get_args(known):
                raise OptionError(f"{shown(value)} is none of {', '.join(get_args(known))}")
        if unknown := {*self.ignore} - {*METRICS}:
            raise OptionError(f"canary_ignore is of {', '.join(METRICS)}, not {shown(min(unknown))}")
        ceilings.parse(self.objective)
        if self.state is not None and not self.state.resolve().parent.is_dir():
            raise OptionError(f"canary_state is a file in a folder that exists, not {self.state}")

    @property
    def model(self) -> str | None:
        """Name of the candidate if it is another bundle, else None."""
        return self.candidate.removeprefix("model=") if self.candidate.startswith("model=") else None

    def speculation(self, candidate: bool) -> str | None:
        """Return how an arm's requests are drafted for; None: as they ask."""
        way = self.candidate if candidate else self.baseline
        return way.removeprefix("speculation=") if way.startswith("speculation=") else None

    @property
    def speculates_in_both(self) -> bool:
        """Return whether acceptance can be compared: two bundles draft in the same way."""
        return self.model is not None and self.baseline != "speculation=off"


class Draws:
    """Draws arms. A key keeps its arm while the weight stays, and can only move to the candidate while it grows."""

    def __init__(self, salt: str, count: int = 0, seen: Iterable[str] = ()) -> None:
        """Continue a canary's draws.

        Args:
            salt: Makes this canary's draws differ from others'.
            count: Number of draws before.
            seen: Hashes of the keys that were drawn for, the latest last.
        """
        self.salt, self.count, self._seen = salt, count, OrderedDict.fromkeys(seen)

    @property
    def seen(self) -> list[str]:
        """Hashes of the keys whose first request has been seen, the latest last."""
        return list(self._seen)

    def draw(self, key: str | None, weight: float) -> Draw:
        """Return a request's arm.

        key: the session, user or tenant whose arm it shares; None: none. weight: the probability of the candidate.
        """
        number, self.count = self.count, self.count + 1
        place = hashlib.sha256(f"{self.salt}\0{key if key is not None else number}".encode()).digest()
        candidate = int.from_bytes(place[:8], "big") / 2**64 < weight
        if key is None:
            return Draw(candidate, weight, number)
        name = place[:8].hex()
        fresh = name not in self._seen
        self._seen[name] = None
        self._seen.move_to_end(name)
        while len(self._seen) > KEYS:
            self._seen.popitem(last=False)
        return Draw(candidate, weight, number, fresh)
