"""A crowd of clients of a server: each has a connection, asks for what a seed says, and keeps what it was told."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from route_client import COMPLETIONS, joined

from specbuild.runtime import Engine, Result, SamplingParams

_SERVERS = frozenset({"prompt", "max_tokens", "stream", "return_token_ids", "deadline", "priority", "speculation"})
EXTRAS: list[dict[str, Any]] = [
    *({"frequency_penalty": 0.5, "presence_penalty": 0.2}, {"repetition_penalty": 1.2}, {"top_p": 0.9, "top_k": 40}),
    *({"stop": ["\n\n", "self"]}, {"deadline": 0.001}, {"deadline": 0.05}, {"deadline": 0.5}, {"min_tokens": 1}),
]


@dataclass(frozen=True)
class Case:
    """A request's body; a client that leaves does so after so many events."""

    body: dict[str, Any]
    leaves: int

    def params(self) -> SamplingParams:
        """What a quiet engine is asked for: no deadline, and no drafts."""
        own = {name: value for name, value in self.body.items() if name not in _SERVERS}
        return SamplingParams(self.body["max_tokens"], **own, speculation="off")


@dataclass
class Outcome:
    """`status` 0: there was no response. `broken`: the connection's error. `code`: of an error that the server told."""

    case: Case
    request_id: str
    status: int = 0
    parts: list[dict[str, Any]] = field(default_factory=list)  # of choices
    code: str | None = None
    broken: str | None = None
    ended: bool = False  # the body had its proper end

    def take(self, told: dict[str, Any]) -> None:
        """A reply, or an event of one."""
        assert not self.ended, "nothing comes after the end"
        if "error" in told:
            self.code = told["error"]["code"] or "error"
        self.parts += told.get("choices", ())


def cases(seed: int, count: int, prompts: Sequence[str]) -> list[Case]:
    """Requests of all kinds, of which one of five leaves."""
    rng = random.Random(seed)
    return [_case(rng, rng.choice([0, 0, 0, 0, 0, 0, 0, 0, 1, 2]), prompts) for _ in range(count)]


def _case(rng: random.Random, leaves: int, prompts: Sequence[str]) -> Case:
    body: dict[str, Any] = {
        "prompt": rng.choice(prompts),
        "max_tokens": 200 if leaves else rng.randint(1, 40),
        "temperature": rng.choice([0, 0.8, 1.0]),
        "seed": rng.randrange(2**32),
        "n": rng.choice([1, 1, 2]),
        "stream": bool(leaves) or rng.random() < 0.5,
        "speculation": rng.choice(["auto", "off", "chain:4", "best:8"]),
        "priority": rng.choice([-1, 0, 0, 3]),
        "return_token_ids": True,
        "ignore_eos": bool(leaves),
    }
    for extra in rng.sample(EXTRAS, rng.randint(0, 2)):
        body |= extra
    return Case(body, leaves)


class Crowd:
    """Clients in threads of their own; `wave` has them ask for some cases, each as soon as it is free."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._lock = url, size, threading.Condition()
        self._asked = 0
        self.outcomes: list[Outcome] = []
        self.refused: list[Outcome] = []  # for which there was no room

    def wave(self, asked: Sequence[Case], each: Callable[[int], None] = lambda done: None) -> None:
        """Ask them all; `each` is told how many outcomes there are after every one.

        What is refused for want of room is asked again once another request has ended. A client whose connection is
        refused, or that is told of a drain, asks no more.
        """
        queue = list(reversed(asked))
        threads = [threading.Thread(target=self._client, args=(queue, each)) for _ in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, queue: list[Case], each: Callable[[int], None]) -> None:
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while True:
                with self._lock:
                    if not queue:
                        return
                    case, self._asked = queue.pop(), self._asked + 1
                    outcome = Outcome(case, f"crowd-{self._asked}")
                ask(client, outcome)
                with self._lock:
                    if outcome.status == 429:
                        self.refused.append(outcome)
                        queue.append(case)
                        self._lock.wait(1)
                        continue
                    self.outcomes.append(outcome)
                    done = len(self.outcomes)
                    self._lock.notify()
                each(done)
                if outcome.status == 0 or outcome.code == "draining":
                    return


def ask(client: httpx.Client, outcome: Outcome) -> None:
    """One request, whatever becomes of it."""
    headers = {"X-Request-Id": outcome.request_id}
    try:
        with client.stream("POST", COMPLETIONS, json=outcome.case.body, headers=headers) as response:
            outcome.status = response.status_code
            if not response.headers["content-type"].startswith("text/event-stream"):
                outcome.take(json.loads(response.read()))
                outcome.ended = True
                return
            events = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            for count, event in enumerate(events, 1):
                if event == "[DONE]":
                    outcome.ended = True
                else:
                    outcome.take(json.loads(event))
                if count == outcome.case.leaves:
                    return
    except httpx.TransportError as error:
        outcome.broken = f"{type(error).__name__}: {error}"


class Quiet:
    """What an engine that nobody else uses decodes for a case."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._known = engine, dict[str, list[Result]]()

    def check(self, outcome: Outcome) -> int:
        """Hold what was told against the engine's texts; how many were whole."""
        case, whole = outcome.case, 0
        key = json.dumps(case.body)
        if key not in self._known:
            self._known[key] = self._engine.generate(case.body["prompt"], case.params())
        for index, expected in enumerate(self._known[key]):
            parts = [part for part in outcome.parts if part["index"] == index]
            found = joined(parts)
            count, reason = len(found["token_ids"]), found.get("finish_reason")
            assert found["token_ids"] == expected.token_ids[:count], (outcome, expected)
            assert expected.text.startswith(found["text"]), (outcome, expected)
            if reason and parts[-1].get("stop_reason") != "deadline":
                told = (found["text"], count, reason)
                assert told == (expected.text, len(expected.token_ids), expected.finish_reason), (outcome, expected)
                whole += 1
        return whole
