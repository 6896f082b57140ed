"""Text to tokens and back: the bundle's tokenizer, its chat template, and the incremental detokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specbuild.runtime.errors import BundleError, ExecutionError, PromptError, SpecbuildError

from .chat import Chat, ChatTemplate

Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | Chat
_CONTEXT = 8  # prompt tokens that tell the decoder whether the first new one begins a word


def _call(kind: type[SpecbuildError], what: str, call: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """What a call of the library gives, or our error: a panic of its Rust, say over a pattern, is no Exception."""
    try:
        return call(*given, **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise kind(f"{what}: {' '.join(str(error).split()) or type(error).__name__}") from error


class Tokenizer:
    """A `tokenizers` model and, where the checkpoint has one, its chat template."""

    def __init__(self, tokenizer: Path | bytes, chat_template: Path | str | None, special: dict[str, str]) -> None:
        """`tokenizer`, `chat_template`: files, or what was read of them."""
        data = tokenizer.read_bytes() if isinstance(tokenizer, Path) else tokenizer
        what = "tokenizer.json is not a tokenizer"
        self._tokenizer = _call(BundleError, what, tokenizers.Tokenizer.from_buffer, data)
        template = chat_template.read_text(encoding="utf-8") if isinstance(chat_template, Path) else chat_template
        self._template = ChatTemplate(template, special) if template is not None else None

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of a chat or its messages (by the chat template), or ids as they are."""
        if isinstance(prompt, str):
            return self._encode(prompt, add_special_tokens=True)
        if isinstance(prompt, Chat):
            return self._encode(self.chat_text(prompt), add_special_tokens=False)
        if not isinstance(prompt, list | tuple):
            raise PromptError(f"a prompt is a text, a list of token ids, or a list of messages, not {prompt!r}")
        if all(isinstance(item, Mapping) for item in prompt) and prompt:
            return self._encode(self.chat_text(Chat(prompt)), add_special_tokens=False)
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return list(prompt)
        raise PromptError("a prompt is a text, a list of token ids, or a list of chat messages")

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt is not valid Unicode: {error.reason} at character {error.start}") from None
        what = "the bundle's tokenizer cannot read this prompt"
        return list(_call(PromptError, what, self._tokenizer.encode, text, add_special_tokens=add_special_tokens).ids)

    def chat_text(self, chat: Chat) -> str:
        """The text the chat template makes of a chat."""
        if self._template is None:
            raise PromptError("the prompt has messages, but this model has no chat template: give it as text")
        return self._template.render(chat)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        what = "the bundle's tokenizer cannot make a text of these tokens"
        return str(_call(ExecutionError, what, self._tokenizer.decode, list(ids), skip_special_tokens=True))

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))


class Detokenizer:
    """The text of a growing output, complete characters only, watched for stop strings.

    `text` is final as far as it goes: what may still become a stop string, or is half a character, is held back. Where
    there is no stop string to watch for, tokens are decoded when the text is asked for, several at once.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._read = 0, len(self._ids)  # the text of _ids[_start:_read] is out already
        self._whole = ""  # everything decoded
        self._stopped = False
        self._text = ""  # what is final of it

    def push(self, token: int) -> bool:
        """Take one token; True where a stop string is complete, the text then ends before it."""
        self._ids.append(token)
        return bool(self._stop) and self._decode()

    @property
    def text(self) -> str:
        """What is final."""
        if not self._stop:
            self._decode()
        return self._text

    def _decode(self) -> bool:
        """Decode up to the last token that ends a character; True where a stop string is complete."""
        before = self._tokenizer.decode(self._ids[self._start : self._read]) if self._read < len(self._ids) else ""
        for end in range(len(self._ids), self._read, -1):
            after = self._tokenizer.decode(self._ids[self._start : end])
            if not after.endswith("\ufffd"):
                self._start, self._read = self._read, end
                return self._grow(after[len(before) :])
        return False

    def finish(self) -> None:
        """The output has ended: nothing is held back any longer."""
        if self._stopped:
            return
        before = self._tokenizer.decode(self._ids[self._start : self._read])
        tail = self._tokenizer.decode(self._ids[self._start :])[len(before) :]
        self._start = self._read = len(self._ids)
        if not self._grow(tail):
            self._text = self._whole

    def _grow(self, piece: str) -> bool:
        checked = len(self._whole)
        self._whole += piece
        found = [self._whole.find(stop, max(0, checked - len(stop) + 1)) for stop in self._stop]
        if any(at >= 0 for at in found):
            self._whole, self._stopped = self._whole[: min(at for at in found if at >= 0)], True
        self._text = self._whole[: len(self._whole) - (0 if self._stopped else self._held())]
        return self._stopped

    def _held(self) -> int:
        """Length of the longest tail that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._whole)), 0, -1):
            if any(stop.startswith(self._whole[-length:]) for stop in self._stop):
                return length
        return 0
