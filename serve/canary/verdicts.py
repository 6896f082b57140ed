"""A canary's judge: draws arms, weighs what requests took, and promotes the candidate or rolls it back."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from specbuild.measure.trial import Trial, Verdict
from specbuild.runtime.checked_json import Text, checked
from specbuild.runtime.errors import SpecbuildError
from specbuild.serve import state_file
from specbuild.serve.request.generation import Draw
from specbuild.serve.supervision import together
from specbuild.serve.telemetry.logs import RequestLog, error_of

from . import canary_objectives as ceilings
from .assignment import KEYS, CanaryOptions, Draws
from .comparison import metrics_of

Phase = Literal["running", "paused", "promoted", "rolled back"]
Percent = Annotated[float, Meta(ge=0, le=100)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
HELD = 1024  # ended requests that wait for earlier ones; beyond that the earlier ones are given up
_TICK, _SAVE = 1.0, 5.0  # seconds between checks whether a step is due, and between writes of the state


@dataclass(frozen=True, slots=True)
class Kept:
    """The saved state, except the trial's."""

    phase: Phase
    weight: Percent
    requests: Annotated[list[Count], Meta(min_length=2, max_length=2)]
    salt: Text
    draws: Count
    seen: Annotated[list[Text], Meta(max_length=KEYS)]
    verdict: Verdict | None


class Judge:
    """Draws arms, collects evidence, and acts on verdicts. For the event loop's thread only.

    Requests count in the order in which they came, each once all before it have ended, so that a slow request cannot
    enter the evidence late.
    """

    def __init__(
        self,
        model: str,
        options: CanaryOptions,
        log: RequestLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Go on from the saved state, or begin.

        Args:
            model: Name of the model whose requests are compared.
            options: What is compared, and how.
            log: The server's log.
            clock: Returns seconds.

        Raises:
            OptionError: If an option or the saved state does not fit.
        """
        self.model, self.options, self._log, self._clock = model, options, log, clock
        self.phase: Phase = "running"
        self.weight, self.requests = options.weight, [0, 0]  # baseline, candidate
        self.verdict: Verdict | None = None  # the first other than hold; a rollback replaces a promotion
        self.draws = Draws(secrets.token_hex(8))
        self._held = dict[int, tuple[Draw, dict[str, float]] | None]()
        self._ready = asyncio.Queue[tuple[Draw, dict[str, float]]]()
        self._ceilings = ceilings.parse(options.objective)
        self.trial = Trial(metrics_of(options), options.alpha)
        self._restore()
        self._next, self._stepped, self._saved, self._changed = self.draws.count, clock(), clock(), False

    def draw(self, key: str | None) -> tuple[bool, Draw | None]:
        """Return whether a request runs as the candidate, and its draw if it counts.

        Args:
            key: The session, user or tenant whose arm it shares; None: none.
        """
        if self.phase in ("promoted", "rolled back"):
            draw, candidate = None, self.phase == "promoted"
        else:
            draw = self.draws.draw(key, self.weight / 100)
            candidate = draw.candidate
        self.requests[candidate] += 1
        return candidate, draw

    def note(self, draw: Draw, values: dict[str, float] | None) -> None:
        """Take what a request showed when it ended; no values: it is no evidence."""
        if draw.number < self._next:
            return
        self._held[draw.number] = (draw, values) if values and draw.fresh else None
        if len(self._held) > HELD:
            self._next = min(self._held)
        while self._next in self._held:
            if found := self._held.pop(self._next):
                self._ready.put_nowait(found)
            self._next += 1

    async def run(self) -> None:
        """Weigh what has ended, take steps, and save the state, until cancelled; a judge that fails rolls back."""
        try:
            await together(self._weighing(), self._stepping())
        except Exception:
            self.turn("rolled back")
            raise
        finally:
            self.save()

    async def settled(self) -> None:
        """Wait until everything that has ended is weighed; `run` must be running."""
        await self._ready.join()

    async def _weighing(self) -> None:
        while True:
            self.weigh(*await self._ready.get())
            self._ready.task_done()
            await asyncio.sleep(0)  # lets requests go first

    async def _stepping(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            self.tick()
            if self._changed or self._clock() - self._saved >= _SAVE:
                self._changed, self._saved = False, self._clock()
                await asyncio.to_thread(self._write, self._state())

    def tick(self) -> None:
        """Take the step, if it is due."""
        now = self._clock()
        if self.phase == "running" and now - self._stepped >= self.options.interval:
            self.weight, self._stepped = min(self.weight + self.options.step_weight, self.options.max_weight), now

    def weigh(self, draw: Draw, values: dict[str, float]) -> None:
        """Add a request's values as evidence, unless the canary is decided, and act on the verdict."""
        if self.phase in ("promoted", "rolled back"):
            return
        values = values | dict(ceilings.held(self._ceilings, values))
        given = np.array([values.get(metric.name, math.nan) for metric in self.trial.metrics])
        self.trial.add(draw.candidate, draw.weight, given)
        kind, known = self.trial.kind(), self.verdict.kind if self.verdict else "hold"
        if kind != "hold" and known not in (kind, "rollback"):
            self.verdict = verdict = self.trial.verdict()
            level = "error" if kind == "rollback" else "info"
            told = f"the canary's verdict is {kind}"
            self._log.event(level, told, model=self.model, candidate=self.options.candidate, **told_of(verdict))
        self._act()

    def _act(self) -> None:
        """Roll back if that is the verdict, and the options ask for it; a promotion is an operator's."""
        if self.phase == "running" and self.verdict and self.verdict.kind == self.options.action:
            self.turn("rolled back")

    def turn(self, phase: Phase) -> None:
        """Enter another phase, by a verdict or an operator's order."""
        self.phase, self._stepped = phase, self._clock()
        self.weight = {"promoted": 100.0, "rolled back": 0.0}.get(phase, self.weight)
        self._log.event("info", f"the canary is {phase}", model=self.model, candidate=self.options.candidate)
        self._changed = True
        self._act()

    def _identity(self) -> dict[str, Any]:
        """Return what a saved state must match to be continued."""
        options = self.options
        names = [metric.name for metric in self.trial.metrics]
        told = {"canary": options.candidate, "baseline": options.baseline, "model": self.model}
        return told | {"alpha": options.alpha, "margin": options.margin, "metrics": names}

    def save(self) -> None:
        """Write the state, if it is kept; an error is logged. While the server runs, `run` writes it in a thread."""
        self._write(self._state())

    def _state(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "phase": self.phase,
            "weight": self.weight,
            "requests": self.requests,
            "salt": self.draws.salt,
        }
        body |= {
            "draws": self.draws.count,
            "seen": self.draws.seen,
            "trial": self.trial.state(),
        }
        body["verdict"] = self.verdict.to_dict() if self.verdict else None
        return body

    def _write(self, body: dict[str, Any]) -> None:
        if self.options.state is None:
            return
        try:
            state_file.store(self.options.state, self._identity(), body)
        except SpecbuildError as error:
            self._log.event("error", "the canary's state could not be written", **error_of(error))

    def _restore(self) -> None:
        """Go on from the saved state, if there is one; raises OptionError."""
        path = self.options.state
        body = path and state_file.load(path, self._identity())
        if not path or not body:
            return
        try:
            kept = checked({name: body[name] for name in Kept.__annotations__}, Kept)
            self.trial.restore(body["trial"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise state_file.unusable(path, error) from None
        self.phase, self.weight, self.requests, self.verdict = kept.phase, kept.weight, kept.requests, kept.verdict
        self.draws = Draws(kept.salt, kept.draws, kept.seen)

    def view(self) -> dict[str, Any]:
        """Return the response of `GET /canary`."""
        options = self.options
        return {
            "model": self.model,
            "candidate": options.candidate,
            "baseline": options.baseline,
            "phase": self.phase,
            "weight": self.weight,
            "max_weight": options.max_weight,
            "action": options.action,
            "alpha": options.alpha,
            "margin": options.margin,
            "requests": {"baseline": self.requests[0], "candidate": self.requests[1]},
            "verdict": (self.verdict or self.trial.verdict()).to_dict(),
            "evidence": [asdict(each) for each in self.trial.evidence()],
        }


def told_of(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict's evidence as fields of the log."""
    evidence = verdict.evidence
    names = zip(("baseline", "candidate"), evidence.means, evidence.n, strict=True)
    means = {f"{arm}_{what}": value for arm, mean, n in names for what, value in (("mean", mean), ("requests", n))}
    return {"metric": evidence.metric, "e": verdict.e, **means}
