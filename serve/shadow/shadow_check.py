"""The shadow oracle: decodes texts that were speculated on again without speculation, and expects the same texts.

A share of the ended texts waits until its engine has nothing else to do. Each is then decoded plainly from its seed, as
a background request that shares no cached prompt, so that it reads no cache row written by speculation. A single text
that differs proves a defect, because speculation, as it is built here, changes no token.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from specbuild.runtime import Engine, Result, SamplingParams
from specbuild.runtime.bundle.atomic_output import write
from specbuild.runtime.engine.receipt import keyed_sha256
from specbuild.runtime.errors import EngineClosedError, SpecbuildError
from specbuild.serve.canary.canary import Canary
from specbuild.serve.metrics import Metrics, Outcome
from specbuild.serve.options import ServeOptions
from specbuild.serve.request.generation import Generation
from specbuild.serve.request.models import Models, ServedModel
from specbuild.serve.supervision import together
from specbuild.serve.telemetry.logs import RequestLog, error_of

WAITING = 64  # shadows per model; more are dropped and counted
TRIES = 16  # attempts at a shadow that other requests interrupt
KEPT = 100  # maximum files of texts that differ


@dataclass(frozen=True, slots=True)
class Shadow:
    """A text to be decoded again.

    params: those of its own sample, as it was decoded. canary: whether a candidate decoded it. other: whether another
    model did, whose texts may differ.
    """

    prompt: list[int]
    params: SamplingParams
    result: Result
    canary: bool = False
    other: bool = False

    def again(self) -> SamplingParams:
        """Return the parameters for decoding it plainly."""
        salt = secrets.token_hex(16)
        return replace(
            self.params, speculation="off", background=True, deadline=None, session=None, logprobs=None, cache_salt=salt
        )

    def differs_at(self, found: Result) -> int | None:
        """Return the position of the first differing token; None if all tokens that were decoded are the text's."""
        tokens, others = self.result.token_ids, found.token_ids
        for position, (one, other) in enumerate(zip(tokens, others, strict=False)):
            if one != other:
                return position
        cut = found.finish_reason == "cancelled" and len(others) < len(tokens)
        return None if cut or len(others) == len(tokens) else min(len(tokens), len(others))


class Oracle:
    """A `Watcher` that keeps shadows, decodes them, and reports the outcomes. For the event loop's thread only.

    `stopped`: models that no longer speculate, because a text differed and `shadow_action` is "off".
    """

    def __init__(
        self, models: Models, options: ServeOptions, metrics: Metrics, log: RequestLog, canary: Canary | None = None
    ) -> None:
        """`canary`: each text of its candidate is offered, to be decoded by its baseline."""
        self.stopped = set[str]()
        self._canary = canary
        self._options, self._metrics, self._log = options, metrics, log
        self._models = {model.name: model for model in models.all}
        self._waiting = {name: asyncio.Queue[Shadow](WAITING) for name in self._models}
        self._draw, self._kept = random.Random(), 0
        self._key = secrets.token_bytes(32)

    def ended(self, generation: Generation) -> None:
        """See `Watcher`; queues texts of a canary's candidate, and a random share of those that were speculated on."""
        canary = self._canary if generation.draw and generation.draw.candidate else None
        model = canary.baseline if canary and canary.compares_texts else generation.served
        name, other = model.name, model is not generation.served
        for choice, result in generation.results.items():
            if result.finish_reason not in ("stop", "length") or not result.metrics:
                continue
            if result.metrics.speculation == "off" and not other:
                continue
            if not canary and self._draw.random() >= self._options.shadow:
                continue
            params = replace(generation.params, n=1, seed=result.metrics.seed)
            shadow = Shadow(generation.prompts[choice // generation.samples], params, result, canary is not None, other)
            try:
                self._waiting[name].put_nowait(shadow)
            except asyncio.QueueFull:
                self._metrics.shadowed(name, "dropped")

    async def run(self) -> None:
        """Decode shadows until cancelled or until the engines close."""
        await together(*(self._serve(model) for model in self._models.values()))

    async def settled(self) -> None:
        """Wait until every queued shadow is settled; `run` must be running."""
        await asyncio.gather(*(waiting.join() for waiting in self._waiting.values()))

    async def _serve(self, model: ServedModel) -> None:
        waiting = self._waiting[model.name]
        with suppress(EngineClosedError):
            while True:
                shadow = await waiting.get()
                outcome = await self._settle(model, shadow)
                if not shadow.other:
                    self._metrics.shadowed(model.name, outcome)
                if shadow.canary and self._canary and outcome in ("equal", "different"):
                    self._canary.compared(outcome)
                waiting.task_done()

    async def _settle(self, model: ServedModel, shadow: Shadow) -> Outcome:
        """Return the final outcome of a shadow; raises EngineClosedError."""
        for _ in range(TRIES):
            while model.admission.requests:  # a request may have come before this task resumed
                await model.admission.idle.wait()
            try:
                outcome = await self._outcome(model, shadow)
            except EngineClosedError:
                raise
            except Exception as error:  # affects this shadow only
                self._log.event("warning", "a shadow could not be decoded", model=model.name, **error_of(error))
                return "failed"
            if outcome:
                return outcome
        return "unfinished"

    async def _outcome(self, model: ServedModel, shadow: Shadow) -> Outcome | None:
        """Return the outcome of one attempt; None if it was interrupted and is to be repeated."""
        (found,) = await model.engine.generate([shadow.prompt], shadow.again())
        if found.error:
            raise found.error
        position = shadow.differs_at(found)
        if position is not None:
            if not shadow.other:
                self._tell(model, shadow, found, position)
            return "different"
        return None if found.finish_reason == "cancelled" else "equal"

    def _tell(self, model: ServedModel, shadow: Shadow, found: Result, position: int) -> None:
        """Report a text that differs: log it, keep a file for `specbuild replay`, and end speculation if asked for."""
        if self._options.shadow_action == "off":
            self.stopped.add(model.name)
        kept = self._keep(model, shadow, found, position)
        told = "speculation gave another text than plain decoding: report it"
        more = {"speculation": "off"} if model.name in self.stopped else {}
        self._log.event("error", told, model=model.name, position=position, file=kept and str(kept), **more)

    def _keep(self, model: ServedModel, shadow: Shadow, found: Result, position: int) -> Path | None:
        folder = self._options.shadow_dir
        if folder is None or self._kept >= KEPT:
            return None
        now = datetime.now(timezone.utc)
        file = folder / f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}.json"
        record = defect(model.engine.engine, shadow, found, position)
        if not self._options.shadow_keep_prompts:
            record = without_prompt(record, self._key)
        try:
            if "key" in record:
                write(folder / record["key"], f"{self._key.hex()}\n".encode(), 0o600)
            write(file, (json.dumps({"time": now.isoformat(), "model": model.name, **record}) + "\n").encode())
        except SpecbuildError as error:
            self._log.event("error", "what differed could not be kept", model=model.name, **error_of(error))
            return None
        self._kept += 1
        return file


def defect(engine: Engine, shadow: Shadow, found: Result, position: int) -> dict[str, Any]:
    """Return a record with both texts, from which `specbuild replay` reproduces their difference."""
    receipt = engine.receipt(shadow.prompt, shadow.params, shadow.result)
    told = {"position": position, "speculation": shadow.params.speculation, "receipt": receipt.to_dict()}
    texts = {"token_ids": shadow.result.token_ids, "plain_token_ids": found.token_ids}
    return told | texts | {"prompt_token_ids": shadow.prompt}


def without_prompt(record: dict[str, Any], key: bytes) -> dict[str, Any]:
    """Return a defect with a keyed hash in place of its prompt; `key` in it names the file that has the key."""
    told = {name: value for name, value in record.items() if name != "prompt_token_ids"}
    told["receipt"] = {name: value for name, value in record["receipt"].items() if name != "prompt_sha256"}
    told["prompt_hmac_sha256"] = keyed_sha256(key, record["prompt_token_ids"])
    return told | {"key": f"{keyed_sha256(key, 'name')[:16]}.key"}
