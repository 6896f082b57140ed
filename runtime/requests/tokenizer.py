"""`Tokenizer`: text to token ids and back, with the bundle's tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from specbuild.runtime.errors import BundleError, ExecutionError, OptionError, PromptError, shown
from specbuild.runtime.sampling.vocabulary import Vocabulary

from .chat import Chat, ChatTemplate
from .library import call
from .text_decoder import ByteDecoder, TextDecoder, WindowDecoder
from .token_pieces import WHAT, TokenPieces, steps_of

Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | Chat
_PIECE = 2**14  # characters per piece when the tokens of a long text are counted
_USUAL = 4  # a text with more characters per allowed token is counted before it is tokenized
_MARGIN = 1.5  # refuse a text whose pieces have so many times too many tokens: each cut may add a few
_SHRINKING = 4  # maximum characters that a normalizer may turn into one
_MAX_CHARACTERS = 2**20  # longer texts are refused by length, if the longest tokens could not hold them


def too_long(what: str, limit: int) -> PromptError:
    """Return the error for a prompt that has `what` (its size) and does not fit into `limit` tokens."""
    return PromptError(
        f"the prompt has {what}, this model takes {limit} with at least one of output: "
        "shorten it, or build with a larger --max-seq-len"
    )


class _Model(msgspec.Struct):
    continuing_subword_prefix: str | None = None
    merges: msgspec.Raw = msgspec.Raw(b"[]")


class _File(msgspec.Struct):
    model: _Model


def check_merges(content: bytes) -> None:
    """Raise ValueError for a tokenizer.json whose merges would make `tokenizers` abort the process.

    From the second part of each merge, `tokenizers` cuts off as many bytes as the model's continuing_subword_prefix
    has. If that is in the middle of a character it panics, and panics again while reporting it, which cannot be caught.
    """
    model = msgspec.json.decode(content, type=_File).model
    if not (prefix := model.continuing_subword_prefix):
        return
    for merge in msgspec.json.decode(model.merges, type=list[str | list[str]]):
        parts = merge.partition(" ") if isinstance(merge, str) else ["", *merge]
        second = parts[-1]
        if not second.startswith(prefix):
            raise ValueError(f"a merge has {shown(second)}, which does not begin with the prefix {shown(prefix)}")


def _pieces_of(tokenizer: tokenizers.Tokenizer) -> TokenPieces | None:
    """Return the bytes of a tokenizer's tokens; None if they depend on the tokens around them."""
    if tokenizer.decoder is None:
        return TokenPieces(tokenizer, None)
    steps = steps_of(json.loads(tokenizer.decoder.__getstate__()))
    return TokenPieces(tokenizer, steps) if steps else None


def _content(file: Path | bytes) -> bytes:
    return file.read_bytes() if isinstance(file, Path) else file


class Tokenizer:
    """A `tokenizers` model and, if the checkpoint has one, its chat template."""

    def __init__(self, tokenizer: Path | bytes, chat_template: Path | bytes | None, special: dict[str, str]) -> None:
        """Make a tokenizer.

        Args:
            tokenizer: A tokenizer.json, as a file or its content.
            chat_template: A chat template, as a file or its content; None: the model has none.
            special: Texts of special tokens by the names that templates use, such as "bos_token".

        Raises:
            BundleError: The content is not a tokenizer, or the template is not UTF-8.
        """
        what = "tokenizer.json is not a tokenizer"
        content = _content(tokenizer)
        call(BundleError, what, check_merges, content)
        self._tokenizer = call(BundleError, what, tokenizers.Tokenizer.from_buffer, content)
        self._tokenizer.no_truncation()  # transformers does not truncate by default either
        self._tokenizer.no_padding()
        self._pieces = call(BundleError, what, _pieces_of, self._tokenizer)
        self._special = {token for token, each in self._tokenizer.get_added_tokens_decoder().items() if each.special}
        self._template: ChatTemplate | None = None
        if chat_template is not None:
            template = call(BundleError, "the chat template is not a text of UTF-8", _content(chat_template).decode)
            self._template = ChatTemplate(template, special)

    def encode(self, prompt: Prompt, limit: int | None = None) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: A text; a Chat or its messages, which the chat template renders; or token ids, returned as they are.
            limit: A prompt of so many tokens or more may be refused before all of it is tokenized; None: no limit.

        Raises:
            PromptError: The prompt is of another type, cannot be tokenized or rendered, or is too long.
        """
        if isinstance(prompt, str):
            return self._encode(prompt, True, limit)
        if isinstance(prompt, Chat):
            return self._encode(self.chat_text(prompt), False, limit)
        if not isinstance(prompt, list | tuple):
            kind = type(prompt).__name__
            raise PromptError(f"a prompt is a text, a list of token ids, or a list of messages, not {kind}")
        kinds = set(map(type, prompt))
        if kinds and all(issubclass(kind, Mapping) for kind in kinds):
            return self._encode(self.chat_text(Chat(prompt)), False, limit)
        if not all(issubclass(kind, int) and kind is not bool for kind in kinds):
            named = ", ".join(sorted(kind.__name__ for kind in kinds)[:4])
            raise PromptError(f"a prompt is a text, a list of token ids (int), or a list of messages, not of {named}")
        if limit is not None and len(prompt) >= limit:
            raise too_long(f"{len(prompt)} tokens", limit)
        return list(prompt)

    def encode_output(self, text: str, limit: int | None = None) -> list[int]:
        """Return the token ids of a text as a model writes it, without a prompt's special tokens; see `encode`."""
        return self._encode(text, False, limit)

    def _encode(self, text: str, add_special_tokens: bool, limit: int | None) -> list[int]:
        if limit is not None and len(text) > max(_PIECE, _USUAL * limit):
            self._refuse_too_long(text, limit)
        ids: list[int] = self._encoding(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _refuse_too_long(self, text: str, limit: int) -> None:
        """Raise PromptError if a text certainly has too many tokens, by its length or the tokens of its first pieces.

        Tokens of pieces are counted only, never used: at the ends of a piece they may differ from the whole text's.
        """
        error = too_long(f"more than {limit} tokens in its {len(text)} characters", limit)
        if len(text) > _MAX_CHARACTERS:
            longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
            if len(text) > _SHRINKING * limit * longest:
                raise error
        found = 0
        for start in range(0, len(text), _PIECE):
            found += len(self._encoding(text[start : start + _PIECE], add_special_tokens=False))
            if found > _MARGIN * limit + 128:
                raise error

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt is not valid Unicode: {error.reason} at character {error.start}") from None
        what = "the bundle's tokenizer cannot read this prompt"
        return call(PromptError, what, self._tokenizer.encode, text, add_special_tokens=add_special_tokens)

    @property
    def chats(self) -> bool:
        """Return whether the bundle has a chat template."""
        return self._template is not None

    def chat_text(self, chat: Chat) -> str:
        """Return a chat rendered by the chat template; raise PromptError if there is no template or it fails."""
        if self._template is None:
            raise PromptError("the prompt has messages, but this model has no chat template: give it as text")
        return self._template.render(chat)

    def template_reads(self, variable: str) -> bool:
        """Return whether the chat template, if there is one, reads a variable; raises PromptError if it is invalid."""
        return self._template is not None and variable in self._template.check().variables

    def decoder(self, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> TextDecoder:
        """Return what decodes the output that follows a prompt's tokens, by default without special tokens."""
        if self._pieces is None:
            special = self._special if skip_special_tokens else frozenset[int]()
            return WindowDecoder(self._decode, prompt, special)
        return ByteDecoder(self._pieces, prompt, skip_special_tokens, self._pieces.strips)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, by default without special tokens; raises ExecutionError."""
        decoder = self.decoder((), skip_special_tokens)
        return decoder.feed(ids) + decoder.finish()

    def _decode(self, ids: list[int]) -> str:
        return str(call(ExecutionError, WHAT, self._tokenizer.decode, ids, skip_special_tokens=False))

    def token_id(self, name: str) -> int | None:
        """Return the id of the token with this name; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(name)
        return found

    def is_special(self, token: int) -> bool:
        """Return whether an id is a special token's, which texts leave out."""
        return token in self._special

    def has(self, token: int) -> bool:
        """Return whether an id is a token's."""
        return self._tokenizer.id_to_token(token) is not None

    def vocabulary(self, size: int, ends: Sequence[int]) -> Vocabulary:
        """Return the tokens as structured outputs need them.

        Args:
            size: Number of tokens of the model.
            ends: Ids of the tokens that end a text, which may be none of the tokenizer's.

        Raises:
            OptionError: What a token writes depends on the tokens around it.
            ExecutionError: The library fails.
        """
        if self._pieces is None:
            raise OptionError(
                "structured_outputs cannot be used: what a token of this tokenizer writes depends on those around it"
            )
        special = {token for token in self._special if token < size} | {*ends}
        added = self._tokenizer.get_added_tokens_decoder()
        names = {token: self._tokenizer.id_to_token(token) or f"<[{token}]>" for token in special}
        return Vocabulary(
            tokenizer=str(call(ExecutionError, "the bundle's tokenizer cannot be written", self._tokenizer.to_str)),
            tokens=tuple(names[token].encode() if token in names else self.token_bytes(token) for token in range(size)),
            special=frozenset(special),
            added={token: each.content for token, each in added.items() if token < size and token not in special},
            ends=tuple(ends),
        )

    def token_text(self, token: int) -> str:
        """Return what one token adds to a text that has begun; U+FFFD stands for a partial character."""
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one token adds to a text that has begun; those of a partial character too."""
        if self._pieces is None:
            return self._decode([token]).encode()
        piece = self._pieces[token]
        return piece.later if piece else b""

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the tokenizer knows, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))
