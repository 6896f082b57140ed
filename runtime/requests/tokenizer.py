"""Text to tokens and back: the bundle's tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specbuild.runtime.errors import BundleError, ExecutionError, PromptError, SpecbuildError

from .chat import Chat, ChatTemplate

Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | Chat


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

    def __init__(self, tokenizer_file: Path, chat_template: Path | None, special: dict[str, str]) -> None:
        what = f"{tokenizer_file.name} is not a tokenizer"
        self._tokenizer = _call(BundleError, what, tokenizers.Tokenizer.from_file, str(tokenizer_file))
        self._template = ChatTemplate(chat_template.read_text(encoding="utf-8"), special) if chat_template else None

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
