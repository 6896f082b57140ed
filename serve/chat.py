"""/v1/chat/completions: what the model says next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specbuild.runtime import Chat, Chunk, Engine, StructuredOutputs

from . import logprobs, tools
from .fields import ChatRequest, Message, TextPart
from .formats import Format
from .generation import Generation


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

    def __init__(self, generation: Generation, *given: Any) -> None:
        super().__init__(generation, *given)
        self._called = set[int]()  # choices that call tools
        self._texts, self._sent = dict[int, str](), dict[int, int]()  # of a stream: all, and how much was sent

    def tokenize(self, engine: Engine) -> list[list[int]]:
        """See `Format.tokenize`."""
        body = self.generation.body
        assert isinstance(body, ChatRequest)
        chat = chat_of(body.messages, body.chat_template_kwargs, body.add_generation_prompt)
        return [engine.encode(replace(chat, tools=tools.described(body)))]

    def choice(self, number: int, chunk: Chunk) -> dict[str, Any]:
        """See `Format.choice`."""
        content, calls = tools.calls(chunk.text, self._body, self._after)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if calls:
            message["tool_calls"] = calls
            self._called.add(number)
        return {"message": message, "logprobs": self._logprobs(chunk)}

    def delta(self, number: int, chunk: Chunk, first: bool) -> dict[str, Any]:
        """See `Format.delta`."""
        said: dict[str, Any] = {"role": "assistant"} if first else {}
        text = self._content(number, chunk, said) if self._body.tools else chunk.text
        if first or text:
            said["content"] = text
        return {"delta": said, "logprobs": self._logprobs(chunk)}

    def _content(self, number: int, chunk: Chunk, said: dict[str, Any]) -> str:
        """What of the text is to be sent now; at its end the calls that it makes are said."""
        self._texts[number] = whole = self._texts.get(number, "") + chunk.text
        sent, content = self._sent.get(number, 0), tools.shown(whole, self._body, ended=False, after=self._after)
        if chunk.result:
            content, calls = tools.calls(whole, self._body, self._after)
            if calls:
                said["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
                self._called.add(number)
        self._sent[number] = max(len(content), sent)
        return content[sent:]

    def _end(self, number: int, chunk: Chunk) -> dict[str, Any]:
        told = super()._end(number, chunk)
        if number in self._called and told["finish_reason"] == "stop":
            told["finish_reason"] = "tool_calls"
        return told

    @property
    def _body(self) -> ChatRequest:
        body = self.generation.body
        assert isinstance(body, ChatRequest)
        return body

    @property
    def _after(self) -> str | None:
        """The token that ends the reasoning, where the text is held to something after it."""
        outputs = self.generation.params.structured_outputs
        return StructuredOutputs.of(outputs).after if outputs else None

    def _logprobs(self, chunk: Chunk) -> Any:
        return None if chunk.logprobs is None else logprobs.chat(self.generation.engine, chunk.logprobs)
