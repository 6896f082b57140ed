"""`StructuredOutputs`: what a text has to be, as data; `grammar.py` turns it into a constraint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from specbuild.runtime.errors import OptionError, shown

from .schemas import inner, values

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_BYTES = 1 << 18  # maximum bytes in UTF-8 of a schema, a regex, a grammar, or all choices
MAX_DEPTH = 64  # maximum nesting of objects and arrays
MAX_CHOICES = 4096


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A form that the text of a request must have; validated on construction, which raises OptionError.

    Exactly one of the first six fields must be given. Compiling one may take seconds, within limits of time and memory,
    in the thread that submits its first request: `Engine.constraint` compiles it ahead.

    Attributes:
        json: A JSON schema, as JSON text or as data; kept as JSON text.
        regex: A regular expression in Rust's syntax, which the whole text matches.
        choice: Texts, one of which the text is.
        grammar: A grammar, in llguidance's Lark or in GBNF.
        json_object: Whether the text is any JSON object.
        structural_tag: Free text in which triggers begin parts of given schemas, as in vLLM and xgrammar; kept as JSON
            text.
        any_whitespace: Whether JSON may have whitespace between its tokens. Without it there is none, and what the
            schema forces is drafted at no cost.
        after: A special token, such as the end of reasoning, before which the text is free; None: the whole text is
            constrained.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | Mapping[str, Any] | None = None
    any_whitespace: bool = False
    after: str | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"structured_outputs: {name} must be true or false, not {shown(getattr(self, name))}")
        given = [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if self.json is False:
            raise OptionError("structured_outputs: the JSON schema false allows nothing: give another")
        if len(given) != 1:
            told = " and ".join(given) or "nothing"
            raise OptionError(f"structured_outputs has {told}: give exactly one of {', '.join(KINDS)}")
        for name in ("regex", "grammar", "after"):
            if getattr(self, name) is not None:
                self._keep(name, _text(name, getattr(self, name)))
        if self.json is not None:
            self._keep("json", _schema("json", self.json))
        if self.choice is not None:
            self._keep("choice", _choice(self.choice))
        if self.structural_tag is not None:
            self._keep("structural_tag", _tag(self.structural_tag))

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: Any) -> StructuredOutputs:
        """Return structured outputs, given as such or as a mapping.

        Args:
            value: A `StructuredOutputs`, which is returned as it is, or a mapping of its fields.

        Raises:
            OptionError: `value` is of another type, has an unknown field, or a field is invalid.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise OptionError(f"structured_outputs: give an object with one of {', '.join(KINDS)}, not {shown(value)}")
        names = [each.name for each in fields(cls)]
        if unknown := [name for name in value if name not in names]:
            raise OptionError(f"structured_outputs has an unknown field {shown(unknown[0])}: use {', '.join(names)}")
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON data that `of` accepts."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in told.items()
            if value is not None and value is not False
        }

    @property
    def key(self) -> str:
        """A text that is the same for equal structured outputs."""
        return json.dumps(self.to_dict(), sort_keys=True)


def _text(name: str, value: Any) -> str:
    if not issubclass(type(value), str) or not str.__len__(value):
        raise OptionError(f"structured_outputs: {name} must be a text that is not empty, not {shown(value)}")
    text = str.__str__(value)
    _check_size(name, text)
    return text


def _check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise OptionError(f"structured_outputs: {name} is not valid Unicode, {error.reason}") from None
    if size > MAX_BYTES:
        raise OptionError(f"structured_outputs: {name} has {size:,} bytes, more than {MAX_BYTES:,}: give a smaller one")


def _object(name: str, value: Any) -> Any:
    """Return JSON data, parsed if given as text; raise OptionError if it is invalid, too large or too deep."""
    if isinstance(value, str):
        _check_size(name, value)
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
            raise OptionError(f"structured_outputs: {name} is not JSON ({str(error)[:200]})") from None
    if _deeper_than(value, MAX_DEPTH):
        raise OptionError(f"structured_outputs: {name} is nested deeper than {MAX_DEPTH}: flatten it")
    return value


def _written(name: str, value: Any) -> str:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise OptionError(f"structured_outputs: {name} is not JSON ({str(error)[:200]})") from None
    _check_size(name, text)
    return text


def _schema(name: str, value: Any) -> str:
    schema = _object(name, value)
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise OptionError(f"structured_outputs: {name} must be a JSON schema, an object, not {shown(schema)}")
    text = _written(name, schema)
    for found in values(schema):
        reference = found.get("$ref") if isinstance(found, Mapping) else None
        if isinstance(reference, str) and not reference.startswith("#"):
            told = shown(reference)
            raise OptionError(f"structured_outputs: {name} refers to {told}, which is not fetched: put it into $defs")
        if isinstance(found, Mapping) and "x-guidance" in found:
            raise OptionError(f"structured_outputs: {name} has x-guidance, which is not supported: leave it out")
    return text


def _choice(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_CHOICES:
        raise OptionError(f"structured_outputs: choice must be a list of 1…{MAX_CHOICES:,} texts, not {shown(value)}")
    texts = tuple(_text("choice", each) for each in value)
    _check_size("choice", "".join(texts))
    return texts


def _tag(value: Any) -> str:
    tag = _object("structural_tag", value)
    structures = tag.get("structures") if isinstance(tag, Mapping) else None
    triggers = tag.get("triggers") if isinstance(tag, Mapping) else None
    whole = isinstance(structures, list) and structures and isinstance(triggers, list) and triggers
    if not whole or any(not isinstance(each, str) or not each for each in triggers or ()):
        raise OptionError(
            'structured_outputs: structural_tag must be {"structures": [{"begin": …, "schema": …, "end": …}], '
            '"triggers": [texts]}'
        )
    for each in structures or ():
        begin, end = (each.get("begin"), each.get("end")) if isinstance(each, Mapping) else (None, None)
        if not isinstance(begin, str) or not isinstance(end, str):
            raise OptionError("structured_outputs: each of structural_tag's structures needs begin, schema and end")
        if not any(begin.startswith(trigger) for trigger in triggers or ()):
            told = shown(begin)
            raise OptionError(f"structured_outputs: structural_tag has begin {told}, which starts with no trigger")
        _schema("structural_tag", each.get("schema", True))
    return _written("structural_tag", tag)


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth + 1):
        level = [part for each in level for part in inner(each)]
        if not level:
            return False
    return True
