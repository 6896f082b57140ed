"""/v1/chat/completions: what the model says next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.runtime import Chat, Chunk, Engine

from . import logprobs
from .fields import ChatRequest, Message, TextPart
from .formats import Format


def chat_of(
    messages: list[Message], variables: Mapping[str, Any] | None, add_generation_prompt: bool | None = None
) -> Chat:
    """A chat as the model's template reads it; raises PromptError."""
    begin = True if add_generation_prompt is None else add_generation_prompt
    return Chat([_plain(each) for each in messages], add_generation_prompt=begin, variables=variables or {})


def _plain(message: Message) -> dict[str, Any]:
    """The fields that a client gave."""
    given = {name: getattr(message, name) for name in message.model_fields_set if name in Message.model_fields}
    if isinstance(message.content, list):
        given["content"] = [{"type": part.type, "text": part.text} for part in message.content if _is_part(part)]
    return {"role": message.role, "content": None, **given}


def _is_part(part: object) -> bool:
    return isinstance(part, TextPart)


class ChatFormat(Format):
    """`chat.completion` objects, and chunks of them."""

    whole, part = "chat.completion", "chat.completion.chunk"
    prefix, operation, begins = "chatcmpl", "chat", True

    def tokenize(self, engine: Engine) -> list[list[int]]:
        """See `Format.tokenize`."""
        body = self.generation.body
        assert isinstance(body, ChatRequest)
        return [engine.encode(chat_of(body.messages, body.chat_template_kwargs, body.add_generation_prompt))]

    def choice(self, number: int, chunk: Chunk) -> dict[str, Any]:
        """See `Format.choice`."""
        return {"message": {"role": "assistant", "content": chunk.text}, "logprobs": self._logprobs(chunk)}

    def delta(self, number: int, chunk: Chunk, first: bool) -> dict[str, Any]:
        """See `Format.delta`."""
        said: dict[str, Any] = {"role": "assistant"} if first else {}
        if first or chunk.text:
            said["content"] = chunk.text
        return {"delta": said, "logprobs": self._logprobs(chunk)}

    def _logprobs(self, chunk: Chunk) -> Any:
        return None if chunk.logprobs is None else logprobs.chat(self.generation.engine, chunk.logprobs)
