"""Chats: messages, tools and template variables, and the template that makes a text of them.

Renders as transformers' `apply_chat_template` does; a template comes with a checkpoint and is not trusted, so it runs
in jinja2's sandbox and sees plain JSON data alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from specbuild.runtime.errors import PromptError

if TYPE_CHECKING:
    import jinja2

_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field, the standard one first


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt made of messages; validated when made, raises PromptError.

    `tools`: JSON schemas of functions. `variables`: whatever else the template reads, such as `enable_thinking`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True  # end with the beginning of the assistant's turn
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _objects(self.messages) or not self.messages or not all("role" in m for m in self.messages):
            raise PromptError("messages must be a list of objects with role and content, at least one")
        if self.tools is not None and not _objects(self.tools):
            raise PromptError(f"tools must be a list of objects, each a function's schema, not {self.tools!r}")
        if not isinstance(self.add_generation_prompt, bool):
            raise PromptError(f"add_generation_prompt must be true or false, not {self.add_generation_prompt!r}")
        names = self.variables if isinstance(self.variables, Mapping) else [None]
        if not all(isinstance(name, str) and name not in _OURS for name in names):
            raise PromptError(f"template variables must be named, and not {', '.join(sorted(_OURS))}")


def _objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value)


class ChatTemplate:
    """A checkpoint's chat template, compiled when it is first used."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self._source, self._special = source, special
        self._compiled: jinja2.Template | None = None

    def render(self, chat: Chat) -> str:
        """The text of a chat; raises PromptError where the template is none, or refuses the messages."""
        from jinja2 import TemplateSyntaxError

        try:
            fields = {"messages": chat.messages, "tools": chat.tools, **chat.variables}
            plain = json.loads(json.dumps(fields, default=dict))
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"the chat is not JSON data ({error}): use texts, numbers, lists and objects") from None
        try:
            self._compiled = self._compiled or _environment().from_string(self._source)
        except TemplateSyntaxError as error:
            raise PromptError(
                f"the bundle's chat template does not parse (line {error.lineno}: {_line(error)}): "
                "give the prompt as text, or build the bundle from a checkpoint with a sound template"
            ) from None
        plain["messages"] = [_reasoning(message) for message in plain["messages"]]
        given = {"documents": None, "add_generation_prompt": chat.add_generation_prompt}
        try:
            return self._compiled.render(**dict(self._special) | plain | given)
        except Exception as error:  # a template is a program, and fails like one
            raise PromptError(f"the chat template refuses these messages: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under the names that templates read."""
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _environment() -> jinja2.Environment:
    """transformers' environment: its whitespace rules, loop controls, filters, globals and `{% generation %}`."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's text for training; here it is the text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

        def _text(self, caller: Any) -> Any:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """Refuses the names that lead out of the sandbox."""

        def __init__(*args: Any, **values: Any) -> None:
            self, *rest = args
            jinja2.utils.Namespace.__init__(self)
            for name, value in dict(*rest, **values).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace holds no name like {name!r}")
            super().__setitem__(name, value)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = lambda *args, **values: dict(*args, **values)
    environment.globals["namespace"] = Namespace
    return environment
