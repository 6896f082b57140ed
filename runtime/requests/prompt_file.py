"""Prompt files: JSON lines with `prompt`, Spec-Bench's `turns`, or a chat's `messages`, plus sampling fields.

A line with `messages` may also have `tools`, and `chat_template_kwargs` with further variables for the template.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import msgspec

from specbuild.runtime.errors import InputError, PromptError, shown
from specbuild.runtime.sampling.parameters import SamplingParams, renamed

from .chat import Chat
from .tokenizer import Prompt

MAX_LINE = 2**24  # maximum bytes of a line
_BESIDE = {  # further fields that each kind of prompt may have
    "prompt": frozenset[str](),
    "turns": frozenset({"question_id", "category", "reference"}),
    "messages": frozenset({"tools", "chat_template_kwargs"}),
}


@dataclass(frozen=True, slots=True)
class Request:
    """A request read from a prompt file.

    Attributes:
        prompt: The prompt; the first turn of a line with turns.
        params: Its sampling parameters.
        turns: All turns of a line with turns.
        category: The line's `category`.
        where: Where the line is, as FILE:LINE.
    """

    prompt: Prompt
    params: SamplingParams
    turns: tuple[str, ...] = ()
    category: str | None = None
    where: str = field(default="", compare=False)

    @property
    def later_turns(self) -> int:
        """Number of turns after the prompt."""
        return len(self.turns[1:])


def read(path: str, defaults: dict[str, Any]) -> list[Request]:
    """Return the requests of a prompt file.

    Args:
        path: The file; `-` is standard input.
        defaults: Sampling parameters, which a line's fields override.

    Raises:
        PromptError: The file cannot be read, has no prompts, or a line in it is invalid.
    """
    requests, number = list[Request](), 0
    try:
        with _opened(path) as file:
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if line.strip():
                    requests.append(replace(_request(line, defaults), where=f"{path}:{number}"))
    except InputError as error:
        raise PromptError(f"{path}:{number}: {error}" if number else str(error)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the file's name
        reason = getattr(error, "strerror", None) or error
        raise PromptError(f"{path} cannot be read ({reason}): give a file of JSON lines") from None
    if not requests:
        raise PromptError(f"{path} has no prompts: give one JSON object per line")
    return requests


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    if path != "-":
        with Path(path).open("rb") as file:
            yield file
    elif sys.stdin is None or sys.stdin.closed:
        raise PromptError("standard input is closed: pipe JSON lines into it, or give a file")
    elif sys.stdin.isatty():
        raise PromptError("standard input is a terminal: pipe JSON lines into it, or give a file")
    else:
        yield sys.stdin.buffer


def _request(line: bytes, defaults: dict[str, Any]) -> Request:
    if len(line) > MAX_LINE:
        raise PromptError(f"longer than {MAX_LINE} bytes: give one JSON object per line")
    try:
        fields = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise PromptError(f"not JSON ({error}): give one object per line") from None
    if not isinstance(fields, dict):
        raise PromptError('not a JSON object: give one like {"prompt": "…"}')
    sources = [name for name in _BESIDE if name in fields]
    if len(sources) != 1:
        raise PromptError(f"has {' and '.join(sources) or 'no prompt'}: give one of {', '.join(_BESIDE)}")
    known = {sources[0]} | SamplingParams.names() | _BESIDE[sources[0]]
    unknown = sorted(set(fields) - known)
    if unknown:
        raise PromptError(f"unknown field {shown(unknown[0])}: use {', '.join(sorted(known))}")
    prompt, turns = _prompt(sources[0], fields)
    sampling = {name: fields[name] for name in SamplingParams.names() & set(fields)}
    category = fields.get("category")
    if not isinstance(category, str | None):
        raise PromptError(f"category must be a string, not {shown(category)}")
    return Request(prompt, SamplingParams(**defaults | renamed(sampling)), turns, category)


def _prompt(source: str, fields: dict[str, Any]) -> tuple[Prompt, tuple[str, ...]]:
    value = fields[source]
    if source == "prompt":
        if not isinstance(value, str):
            raise PromptError(f"prompt must be a string, not {shown(value)}")
        return value, ()
    if source == "turns":
        if not isinstance(value, list) or not value or not all(isinstance(turn, str) for turn in value):
            raise PromptError("turns must be a list of strings, at least one")
        return value[0], tuple(value)
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise PromptError(f"chat_template_kwargs must be an object, not {shown(variables)}")
    return Chat(value, fields.get("tools"), variables=variables), ()
