"""Drift: whether texts and drafts of served models still are as in a reference window, which a file keeps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specbuild.measure.drift import Alarm, Reference, Signal
from specbuild.runtime import Result
from specbuild.runtime.checked_json import checked
from specbuild.runtime.errors import OptionError, SpecbuildError, shown
from specbuild.serve import state_file
from specbuild.serve.request.generation import Generation
from specbuild.serve.request.models import Models, ServedModel
from specbuild.serve.request_outcome import observed
from specbuild.serve.telemetry.logs import RequestLog, error_of

from .text_sample import Sample

PREFIX = "specbuild:drift_"
SIGNALS = ("acceptance", "tokens", "cut", "logprob")
MAX_SIZE = 20_000  # values of a reference: those of many models stay a file that a start reads
QUEUED = 4096  # requests that wait to be examined; more are dropped
KEEPS = 20  # number of times that a reference window is written while it fills
_SIGNALS_OF = dict[str, Annotated[list[float], Meta(min_length=1)]]
_Ended = tuple[str, dict[str, float], list[Result], list[list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftOptions:
    """Options of the watch on drift, and of its reference window.

    Args:
        reference: File of the reference window, written as it fills.
        size: Values of each signal in the reference window.
        sample: File for a sample of live texts; None: none.
        sample_share: Share of texts, 0 to 1, that go into the sample.

    Raises:
        OptionError: If a value is out of range, or a file's folder does not exist.
    """

    reference: Path
    size: int = 1000
    sample: Path | None = None
    sample_share: float = 0.1

    def __post_init__(self) -> None:
        if not 500 <= self.size <= MAX_SIZE:
            raise OptionError(f"drift_size is 500…{MAX_SIZE} values, not {shown(self.size)}")
        if not 0 <= self.sample_share <= 1:
            raise OptionError(f"drift_sample_share is a share of texts, 0 to 1, not {shown(self.sample_share)}")
        for path in (self.reference, self.sample):
            if path is not None and not path.resolve().parent.is_dir():
                raise OptionError(f"{path} is in no folder that exists: make it, or give another file")


class Watched:
    """One model's signals: each collects values until its reference is full, and is watched from then on."""

    def __init__(self, size: int, references: Mapping[str, list[float]], filling: Mapping[str, list[float]]) -> None:
        self._size = size
        self.collected = {name: list(references.get(name, filling.get(name, ()))) for name in SIGNALS}
        self.signals = {name: Signal(Reference(each)) for name, each in references.items()}
        self.alarms = dict.fromkeys(SIGNALS, 0)

    def add(self, name: str, value: float) -> Alarm | bool:
        """Add a value; return an alarm, or whether to write the references: this one is full or has grown a lot."""
        if signal := self.signals.get(name):
            alarm = signal.add(value)
            self.alarms[name] += alarm is not None
            return alarm or False
        values = self.collected[name]
        values.append(value)
        if len(values) < self._size:
            return len(values) % (self._size // KEEPS) == 0
        self.signals[name] = Signal(Reference(values))
        return True


class Drift(Collector):
    """A `Watcher` of every model's drift; leaves out a canary's candidates.

    For the event loop's thread only, except `collect`.
    """

    def __init__(self, models: Models, options: DriftOptions, log: RequestLog) -> None:
        """Restore the references; raises OptionError if the file is no reference of these bundles."""
        self._options, self._log, self._draw = options, log, random.Random()
        self._models = {model.name: model for model in models.all}
        self._identity = {"drift": {name: model.engine.engine.manifest.digest for name, model in self._models.items()}}
        full, filling = self._restore()
        self.watched = {name: Watched(options.size, full.get(name, {}), filling.get(name, {})) for name in self._models}
        self._ended = asyncio.Queue[_Ended](QUEUED)
        self._sample = Sample(options.sample) if options.sample else None

    def ended(self, generation: Generation) -> None:
        """See `Watcher`; queues the request."""
        values = observed(generation)
        if not values or (generation.draw and generation.draw.candidate) or self._ended.full():
            return
        results = [generation.results[choice] for choice in sorted(generation.results)]
        self._ended.put_nowait((generation.served.name, values, results, generation.prompts))

    async def run(self) -> None:
        """See `Watcher`; examines requests that have ended, one by one; between two, the server's requests run."""
        try:
            while True:
                await self._look(*await self._ended.get())
                self._ended.task_done()
                await asyncio.sleep(0)
        finally:
            self._write(self._state())

    async def settled(self) -> None:
        """Wait until every request that has ended is examined; `run` must be running."""
        await self._ended.join()

    async def _look(self, name: str, values: dict[str, float], results: list[Result], prompts: list[list[int]]) -> None:
        found = {signal: value for signal, value in values.items() if signal in SIGNALS}
        if known := [each.logprob for result in results for each in result.logprobs or ()]:
            found["logprob"] = sum(known) / len(known)
        if self.tell(name, found):
            await asyncio.to_thread(self._write, self._state())
        if results and prompts:
            await self._keep(self._models[name], results[0], prompts[0])

    async def _keep(self, model: ServedModel, result: Result, prompt: list[int]) -> None:
        """Put a text into the sample if it is drawn; an error is logged and ends the sample."""
        if self._sample is None or self._draw.random() >= self._options.sample_share:
            return
        adding = partial(self._sample.add, model.engine.engine, model.name, prompt, result.token_ids)
        try:
            await asyncio.get_running_loop().run_in_executor(None, adding)
        except SpecbuildError as error:
            self._sample = None
            self._log.event("error", "no more texts are sampled", **error_of(error))

    def tell(self, name: str, values: Mapping[str, float]) -> bool:
        """Add a request's values of signals and log alarms; return whether references have grown, to be written."""
        grown = False
        for signal, value in values.items():
            found = self.watched[name].add(signal, value)
            if isinstance(found, Alarm):
                self._warn(name, signal, found)
            grown = grown or found is True
        return grown

    def _warn(self, name: str, signal: str, alarm: Alarm) -> None:
        told = {"model": name, "signal": signal, **asdict(alarm)}
        if signal.startswith("acceptance") and alarm.direction == "lower":
            sample = self._options.sample or "SAMPLE.jsonl, which --drift-sample writes"
            self._log.event("warning", "the draft is stale: fewer of its tokens come true", **told)
            self._log.event(
                "info", f"make a draft anew: specbuild distill TARGET --out DRAFT --text {sample}", model=name
            )
        else:
            self._log.event("warning", f"{signal} has drifted", **told)

    def _state(self) -> dict[str, Any]:
        full, filling = dict[str, _SIGNALS_OF](), dict[str, _SIGNALS_OF]()
        for name, each in self.watched.items():
            full[name] = {signal: each.collected[signal] for signal in each.signals}
            filling[name] = {
                signal: values for signal, values in each.collected.items() if values and signal not in full[name]
            }
        return {"models": full, "filling": filling}

    def _write(self, body: dict[str, Any]) -> None:
        try:
            state_file.store(self._options.reference, self._identity, body)
        except SpecbuildError as error:
            self._log.event("error", "the reference window could not be written", **error_of(error))

    def _restore(self) -> tuple[dict[str, _SIGNALS_OF], dict[str, _SIGNALS_OF]]:
        """Return references by model and signal, the full ones and the others; raises OptionError."""
        path = self._options.reference
        body = state_file.load(path, self._identity) or {"models": {}}
        try:
            full, filling = (
                checked(each, dict[str, _SIGNALS_OF]) for each in (body.get("models"), body.get("filling", {}))
            )
            if unknown := {signal for each in (*full.values(), *filling.values()) for signal in each} - {*SIGNALS}:
                raise ValueError(f"no signals: {', '.join(sorted(unknown))[:200]}")
        except ValueError as error:
            raise state_file.unusable(path, error) from None
        return full, filling

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        labels = "model_name", "signal"
        psi = GaugeMetricFamily(PREFIX + "psi", "Population stability index of the latest values.", labels=labels)
        alarms = CounterMetricFamily(PREFIX + "alarms", "Times that a signal was found to have moved.", labels=labels)
        for name, watched in self.watched.items():
            for signal, count in watched.alarms.items():
                alarms.add_metric([name, signal], count)
            for signal, each in list(watched.signals.items()):
                psi.add_metric([name, signal], each.psi)
        yield from (psi, alarms)
