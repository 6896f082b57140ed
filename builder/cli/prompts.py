"""Prompt files: JSON lines with `prompt`, Spec-Bench's `turns`, or a chat's `messages`, plus sampling fields."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime import Prompt, SamplingParams
from ...runtime.errors import InputError, PromptError

_SOURCES = ("prompt", "turns", "messages")
_SPEC_BENCH = frozenset({"question_id", "category", "reference"})


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, its parameters, and how many of its later turns are not run."""

    prompt: Prompt
    params: SamplingParams
    later_turns: int = 0


def read(path: str, defaults: dict[str, Any]) -> list[Request]:
    """The requests of a file, `-` for standard input; a line's fields override `defaults`. Raises PromptError."""
    try:
        text = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise PromptError(f"{path} cannot be read ({error.strerror}): give a file of JSON lines") from None
    requests = []
    for number, line in enumerate(text.split(b"\n"), 1):
        if line.strip():
            try:
                requests.append(_request(line, defaults))
            except InputError as error:
                raise PromptError(f"{path}:{number}: {error}") from None
    if not requests:
        raise PromptError(f"{path} has no prompts: give one JSON object per line")
    return requests


def _request(line: bytes, defaults: dict[str, Any]) -> Request:
    try:
        fields = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise PromptError(f"not JSON ({error}): give one object per line") from None
    if not isinstance(fields, dict):
        raise PromptError('not a JSON object: give one like {"prompt": "…"}')
    sources = [name for name in _SOURCES if name in fields]
    if len(sources) != 1:
        raise PromptError(f"has {' and '.join(sources) or 'no prompt'}: give one of {', '.join(_SOURCES)}")
    known = {sources[0]} | SamplingParams.names() | (_SPEC_BENCH if sources[0] == "turns" else set())
    unknown = sorted(set(fields) - known)
    if unknown:
        raise PromptError(f"unknown field {unknown[0]!r}: use {', '.join(sorted(known))}")
    prompt, later_turns = _prompt(sources[0], fields[sources[0]])
    sampling = {name: fields[name] for name in SamplingParams.names() & set(fields)}
    return Request(prompt, SamplingParams(**defaults | sampling), later_turns)


def _prompt(source: str, value: Any) -> tuple[Prompt, int]:
    if source == "prompt":
        if not isinstance(value, str):
            raise PromptError(f"prompt must be a string, not {value!r}")
        return value, 0
    if source == "turns":
        if not isinstance(value, list) or not value or not all(isinstance(turn, str) for turn in value):
            raise PromptError("turns must be a list of strings, at least one")
        return value[0], len(value) - 1
    chat = isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value)
    if not chat:
        raise PromptError("messages must be a list of objects with role and content, at least one")
    return value, 0
