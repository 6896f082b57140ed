"""Chats (messages, tools and template variables) and the chat templates that render them as text.

Rendering matches transformers' `apply_chat_template`. A template comes with a checkpoint and is not trusted, so it runs
in jinja2's sandbox with a budget of work, and sees plain JSON data only.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from specbuild.runtime.errors import PromptError, shown

if TYPE_CHECKING:
    import jinja2

MAX_TEMPLATE = 2**16  # maximum characters of a template; the longest in use have 50,000
MAX_WEIGHT = 2**23  # maximum weight of a chat: its characters, plus 32 per value
MAX_MESSAGES = 2**16
MAX_DEPTH = 64  # maximum nesting of lists and objects
MAX_SAID = 300  # maximum characters of a template's own error message
_VALUE = 32
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field, in order of precedence


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt made of messages; validated on construction, which raises PromptError.

    Attributes:
        messages: Messages, at least one: objects with "role", a text, and usually "content", a text or a list of parts
            {"type": "text", "text": "…"}. Copied, like `tools` and `variables`, as plain JSON data.
        tools: JSON schemas of the functions that the model may call; None: no tools.
        add_generation_prompt: Whether the rendered text ends with the beginning of the assistant's turn.
        variables: Further variables that the template reads, such as `enable_thinking`.
        weight: Number of characters, plus 32 for each value and key; computed, and bounded by MAX_WEIGHT.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    weight: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        copier = _Copier()
        for name in ("messages", "tools", "variables"):
            object.__setattr__(self, name, copier.copied(name, getattr(self, name)))
        object.__setattr__(self, "weight", copier.weight)
        if not _objects(self.messages) or not self.messages:
            raise PromptError("messages must be a list of objects with role and content, at least one")
        for message in self.messages:
            if not isinstance(message.get("role"), str):
                raise PromptError("messages must be objects with role, a text such as user or assistant, and content")
            _check_parts(message.get("content"))
        if self.tools is not None and not _objects(self.tools):
            raise PromptError("tools must be a list of objects, each a function's schema")
        if not isinstance(self.add_generation_prompt, bool):
            raise PromptError("add_generation_prompt must be true or false")
        names = self.variables if isinstance(self.variables, dict) else [None]
        if not all(isinstance(name, str) and name not in _OURS for name in names):
            raise PromptError(f"template variables must be named, and not {', '.join(sorted(_OURS))}")


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _check_parts(content: Any) -> None:
    """Raise PromptError if a list of content parts has any part that is not text."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PromptError(f'a content part is {shown(kind)}: this runtime reads {{"type": "text", "text": "…"}}')
        if not isinstance(part.get("text"), str):
            raise PromptError('a content part of type text has no text: give {"type": "text", "text": "…"}')


class _Copier:
    """Copies JSON-like data into plain dicts, lists, texts and numbers, and adds up its weight."""

    def __init__(self) -> None:
        self.weight, self._name = 0, ""

    def copied(self, name: str, value: Any) -> Any:
        """Return a copy; raise PromptError if the data is too large or not JSON-like, or an object in it raises."""
        self._name = name
        if isinstance(value, list | tuple) and len(value) > MAX_MESSAGES:
            raise PromptError(f"{name} has {len(value):,} items: give {MAX_MESSAGES:,} at most")
        try:
            return self._copy(value, MAX_DEPTH)
        except PromptError:
            raise
        except Exception as error:  # raised by the caller's own mapping or list type
            raise PromptError(f"{name} cannot be read as JSON data ({_line(error)})") from None

    def _copy(self, value: Any, depth: int) -> Any:
        self.weight += _VALUE
        if isinstance(value, str):
            self.weight += len(value)
        if self.weight > MAX_WEIGHT:
            raise PromptError(f"the chat is too large: give at most {MAX_WEIGHT:,} characters, {_VALUE} more per value")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)  # a subclass may override __str__
        if isinstance(value, int) and value.bit_length() <= 1024:
            return int.__index__(value)
        if isinstance(value, float) and math.isfinite(value):
            return float.__float__(value)
        if not depth:
            raise PromptError(f"{self._name} is nested more than {MAX_DEPTH} deep, or contains itself")
        if isinstance(value, Mapping):
            return {self._key(key): self._copy(each, depth - 1) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._copy(each, depth - 1) for each in value]
        what = "a number that JSON has not" if isinstance(value, int | float) else f"a {type(value).__name__}"
        raise PromptError(f"{self._name} is not JSON data, it has {what}: use texts, numbers, lists and objects")

    def _key(self, key: Any) -> str:
        if not isinstance(key, str):
            raise PromptError(f"{self._name} is not JSON data, a key is a {type(key).__name__}: use texts")
        return str(self._copy(key, 0))


class _Compiled(NamedTuple):
    """A compiled template, and what it reads."""

    template: jinja2.Template
    variables: frozenset[str]  # that it reads
    reads_parts: bool  # whether it iterates over the parts of a message's content itself


class ChatTemplate:
    """A checkpoint's chat template, compiled on first use; `special` maps names to special tokens' texts."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._source, self._special = source, special
        self._compiled: _Compiled | PromptError | None = None
        self._lock = threading.Lock()

    def check(self) -> _Compiled:
        """Return the compiled template; raise PromptError if it is invalid."""
        with self._lock:
            self._compiled = self._compiled or _compile(self._source)
        if isinstance(self._compiled, PromptError):
            raise PromptError(str(self._compiled))
        return self._compiled

    def render(self, chat: Chat) -> str:
        """Return the text of a chat; raise PromptError if the template is invalid or refuses the messages."""
        template, variables, reads_parts = self.check()
        if chat.tools and "tools" not in variables:
            told = "give one that does (chat_template, or serve --chat-template hermes), or leave tools out"
            raise PromptError(f"the model's chat template does not read tools: {told}")
        given = {
            "messages": [_message(dict(message), reads_parts) for message in chat.messages],
            "tools": chat.tools,
            "documents": None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        from .template_budget import budget

        try:
            with budget(chat.weight):
                return template.render(**dict(self._special) | dict(chat.variables) | given)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a template is a program and may fail in any way
            raise PromptError(f"the chat template refuses these messages: {_line(error)}") from None


def _line(error: BaseException) -> str:
    try:
        return " ".join(str(error)[: 4 * MAX_SAID].split())[:MAX_SAID] or type(error).__name__
    except Exception:  # the `__str__` of the caller's error fails
        return type(error).__name__


def _compile(source: str) -> _Compiled | PromptError:
    """Return a compiled template, or the error that every chat gets."""
    if len(source) > MAX_TEMPLATE:
        problem = f"has {len(source):,} characters, more than {MAX_TEMPLATE:,}"
    else:
        try:
            from jinja2 import meta

            from .template_environment import compiled, environment, parsed

            made = environment()
            tree = parsed(made, source)
            variables = frozenset(meta.find_undeclared_variables(tree))
            return _Compiled(compiled(made, tree), variables, _reads_parts(tree))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # jinja2's and Python's compilers fail in many ways
            line = getattr(error, "lineno", None)
            problem = f"does not parse ({f'line {line}: ' if line else ''}{_line(error)})"
    return PromptError(
        f"the bundle's chat template {problem}: "
        "give the prompt as text, or build the bundle from a checkpoint with a sound template"
    )


def _reads_parts(tree: jinja2.nodes.Template) -> bool:
    """Return whether a template has a loop over something named `content`."""
    from jinja2 import nodes

    for loop in tree.find_all(nodes.For):
        over = loop.iter
        if isinstance(over, nodes.Getitem) and isinstance(over.arg, nodes.Const):
            name = over.arg.value
        else:
            name = getattr(over, "attr" if isinstance(over, nodes.Getattr) else "name", None)
        if name == "content":
            return True
    return False


def _message(message: dict[str, Any], reads_parts: bool) -> dict[str, Any]:
    """Return a message with its reasoning under the names that templates read; join its parts unless `reads_parts`."""
    if isinstance(message.get("content"), list) and not reads_parts:
        message["content"] = "".join(part["text"] for part in message["content"])
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}
