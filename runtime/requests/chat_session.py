"""A chat as it grows line by line: `specbuild chat` and the server's page share it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from specbuild.runtime.errors import PromptError

from .chat import Chat

COMMANDS = """\
/system TEXT  instructions for every answer; without TEXT, none
/reset        forget what was said, but for the instructions
/help         this"""
_COMMAND = re.compile(r"(/[a-z]+)(?:\s+(.*))?", re.DOTALL)
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class ChatSession:
    """A chat of one person with the model.

    Attributes:
        system: Instructions for every answer; None for none.
        said: Messages with role and content, each of the user's followed by its answer.
    """

    system: str | None = None
    said: tuple[Message, ...] = ()

    def take(self, line: str) -> Turn:
        """Do what a line asks for: a command changes the session, and all else is a message to be answered.

        Args:
            line: What was typed.

        Raises:
            PromptError: There is no such command.
        """
        asked = _COMMAND.fullmatch(line)
        if asked is None:
            instructions = [{"role": "system", "content": self.system}] if self.system else []
            return Turn(self, Chat([*instructions, *self.said, {"role": "user", "content": line}]))
        if asked[1] == "/system":
            return Turn(replace(self, system=asked[2]))
        if asked[1] == "/reset":
            return Turn(replace(self, said=()))
        if asked[1] == "/help":
            return Turn(self, notice=COMMANDS)
        raise PromptError(f"there is no {asked[1]}: /help shows what there is")

    def answered(self, message: str, answer: str) -> ChatSession:
        """The session after an answer. A message that got none is not kept, so nobody calls this for it.

        Args:
            message: What the user said.
            answer: What the model said, as far as it came where it was stopped.
        """
        own = {"role": "user", "content": message}, {"role": "assistant", "content": answer}
        return replace(self, said=(*self.said, *own))


@dataclass(frozen=True, slots=True)
class Turn:
    """The outcome of a line.

    Attributes:
        session: The session from now on.
        chat: What the model is to answer; None after a command.
        notice: What the person is to be shown besides; None for nothing.
    """

    session: ChatSession
    chat: Chat | None = None
    notice: str | None = None
