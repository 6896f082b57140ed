"""A crowd of clients of a server: each has a connection, asks for what a seed says, and keeps what it was told."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from specbuild.runtime import Engine, Result, SamplingParams

Fate = Literal["whole", "leaves", "malformed"]
MALFORMED = (
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"prompt": 5}',
    b'{"prompt": [4294967295]}',
    b'{"prompt": "x", "colour": 1}',
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "speculation": "bush:9"}',
)
_SERVERS = frozenset({"prompt", "max_tokens", "stream", "return_token_ids", "deadline", "priority", "speculation"})


@dataclass(frozen=True)
class Case:
    """A request's body, and what becomes of it: a client that leaves does so after the first event or the second."""

    body: dict[str, Any]
    fate: Fate
    raw: bytes

    def params(self) -> SamplingParams:
        """What a quiet engine is asked for: no deadline, and no drafts."""
        own = {name: value for name, value in self.body.items() if name not in _SERVERS}
        return SamplingParams(self.body["max_tokens"], **own, speculation="off")


@dataclass
class Choice:
    """What has come of one sample's text."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None

    def add(self, told: dict[str, Any]) -> None:
        """A chunk of it, or all."""
        self.text += told["text"]
        self.token_ids += told["token_ids"]
        self.finish_reason, self.stop_reason = told["finish_reason"], told.get("stop_reason")


@dataclass
class Outcome:
    """`status` 0: there was no response. `broken`: the connection's error. `code`: of an error that the server told."""

    case: Case
    request_id: str
    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    code: str | None = None
    broken: str | None = None
    ended: bool = False  # the body had its proper end


def cases(seed: int, count: int, prompts: Sequence[str]) -> list[Case]:
    """Requests of all kinds: one of five leaves, one of twenty is malformed."""
    rng = random.Random(seed)
    fates: list[Fate] = ["leaves"] * (count // 5) + ["malformed"] * (count // 20)
    fates += ["whole"] * (count - len(fates))
    rng.shuffle(fates)
    return [_case(rng, fate, prompts) for fate in fates]


def _case(rng: random.Random, fate: Fate, prompts: Sequence[str]) -> Case:
    body: dict[str, Any] = {
        "prompt": rng.choice(prompts),
        "max_tokens": 200 if fate == "leaves" else rng.randint(1, 40),
        "temperature": rng.choice([0, 0.8, 1.0]),
        "seed": rng.randrange(2**32),
        "n": rng.choice([1, 1, 2]),
        "stream": fate == "leaves" or rng.random() < 0.5,
        "speculation": rng.choice(["auto", "off", "chain:4", "best:8"]),
        "priority": rng.choice([-1, 0, 0, 3]),
        "return_token_ids": True,
        "ignore_eos": fate == "leaves",
    }
    extras: list[dict[str, Any]] = [
        {"frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"repetition_penalty": 1.2},
        {"top_p": 0.9, "top_k": 40},
        {"stop": ["\n\n", "self"]},
        {"deadline": rng.choice([0.001, 0.05, 0.5])},
        {"min_tokens": min(4, body["max_tokens"])},
    ]
    for extra in rng.sample(extras, rng.randint(0, 2)):
        body |= extra
    raw = rng.choice(MALFORMED) if fate == "malformed" else json.dumps(body).encode()
    return Case(body, fate, raw)


class Crowd:
    """Clients in threads of their own; `wave` has them ask for some cases, each as soon as it is free."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._lock = url, size, threading.Condition()
        self._asked = 0
        self.outcomes: list[Outcome] = []
        self.refused: list[Outcome] = []  # for which there was no room

    def wave(self, asked: Sequence[Case], each: Callable[[int], None] | None = None) -> list[Outcome]:
        """Their outcomes, once all are there; `each` is told how many there are after every one.

        What is refused for want of room is asked again once another request has ended. A client whose connection is
        refused, or that is told of a drain, asks no more.
        """
        queue, begun = list(reversed(asked)), len(self.outcomes)
        threads = [threading.Thread(target=self._client, args=(queue, each)) for _ in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.outcomes[begun:]

    def _client(self, queue: list[Case], each: Callable[[int], None] | None) -> None:
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
                if each:
                    each(done)
                if outcome.status == 0 or outcome.code == "draining":
                    return


def ask(client: httpx.Client, outcome: Outcome) -> None:
    """One request, whatever becomes of it."""
    headers = {"Content-Type": "application/json", "X-Request-Id": outcome.request_id}
    try:
        with client.stream("POST", "/v1/completions", content=outcome.case.raw, headers=headers) as response:
            outcome.status = response.status_code
            if response.headers["content-type"].startswith("text/event-stream"):
                _read(response, outcome)
                return
            told = json.loads(response.read())
            outcome.code = told["error"]["code"] or "error" if "error" in told else None
            for each in told.get("choices", ()):
                outcome.choices.setdefault(each["index"], Choice()).add(each)
            outcome.ended = True
    except httpx.TransportError as error:
        outcome.broken = f"{type(error).__name__}: {error}"


def _read(response: httpx.Response, outcome: Outcome) -> None:
    leaves = outcome.case.body["seed"] % 2 + 1 if outcome.case.fate == "leaves" else 0
    events = (line.removeprefix("data: ") for line in response.iter_lines() if line)
    for count, event in enumerate(events, 1):
        if event == "[DONE]":
            outcome.ended = True
            continue
        assert not outcome.ended, "nothing comes after the end"
        told = json.loads(event)
        if "error" in told:
            outcome.code = told["error"]["code"] or "error"
        for each in told.get("choices", ()):
            outcome.choices.setdefault(each["index"], Choice()).add(each)
        if count == leaves:
            return


class Quiet:
    """What an engine that nobody else uses decodes for a case."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._known = engine, dict[bytes, list[Result]]()

    def check(self, outcome: Outcome) -> int:
        """Hold what was told against the engine's texts; how many were whole."""
        raw = outcome.case.raw
        if raw not in self._known:
            self._known[raw] = self._engine.generate(outcome.case.body["prompt"], outcome.case.params())
        whole = 0
        for index, choice in outcome.choices.items():
            expected, count = self._known[raw][index], len(choice.token_ids)
            assert choice.token_ids == expected.token_ids[:count], (outcome, expected)
            assert expected.text.startswith(choice.text), (outcome, expected)
            if choice.finish_reason and choice.stop_reason != "deadline":
                told = (choice.text, count, choice.finish_reason)
                assert told == (expected.text, len(expected.token_ids), expected.finish_reason), (outcome, expected)
                whole += 1
        return whole
