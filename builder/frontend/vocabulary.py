"""Adapts a draft so that it reads and predicts the target's token ids, whatever its own tokenizer is.

Tokens of different tokenizers match if they stand for the same bytes. The draft's head keeps the rows of the tokens
that both have, so it drafts only those, and nothing is translated at run time: the token-level intersection (TLI) of
arXiv 2502.05202. The draft reads text as the target's tokenizer splits it, so it also reads tokens that it lacks. Such
a token gets the embedding of the last piece into which the draft's tokenizer splits its text. The mean of the pieces,
plain or weighted by length or position, was accepted less often on the reference pair with six other tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from torch import nn
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specbuild.measure.tuning.measure import PROMPTS
from specbuild.runtime.errors import CheckpointError, shown

from .checkpoint import Checkpoint, encode, model_of
from .layer_by_layer import LayeredModel
from .lazy_weights import Picked, Weight, of_model, shape_only
from .logits_file import LOWEST, LogitsFile

Kind = Literal["identical", "padded", "reordered", "intersecting"]
Meaning = tuple[bool, bytes]  # whether it is a special token, and the bytes that it stands for
DRAFT_TOKENS, PARD_TOKEN = "draft_tokens", "pard_token"  # config.json: a trimmed head's tokens, the mask's id
MAX_DRAFTED = 65_536  # of 151,936 these were 98 % of Qwen2.5-Coder's code, and a draft's step took a quarter less
LEAST_SHARED = 0.01  # minimum fraction of the target's tokens that a draft must have
LEAST_COVERED = 0.1  # minimum fraction of the tokens in PROMPTS that a draft must have
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_CHARACTERS: dict[int, str] = bytes_to_unicode()  # how byte-level tokenizers write each byte
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


@dataclass(frozen=True)
class Vocabulary:
    """The relation of a draft's tokens to the target's.

    Attributes:
        kind: "identical"; "padded", the same tokens but another number of rows; "reordered", the same tokens with other
            ids; or "intersecting", another tokenizer.
        rows: Rows of the embedding after `fit`: up to the target's last token, and one more for a mask.
        columns: Columns of the head's logits after `fit`.
        tokens: Each column's target token, ascending; None if column i is token i.
        shared: How many of the target's tokens can be drafted.
        mask_token: The id of a PARD draft's mask, which occurs in no text; None for other drafts.
        sources: For each row of the new embedding, the draft's row to copy, or −1 for the mean of all rows; None if the
            embedding stays unchanged.
    """

    kind: Kind
    rows: int
    columns: int
    tokens: tuple[int, ...] | None = field(repr=False)
    shared: int
    mask_token: int | None = None
    sources: tuple[int, ...] | None = field(default=None, repr=False)

    def covered(self, ids: Sequence[int]) -> float:
        """Return the fraction of a text's token ids that can be drafted; 1 for an empty text."""
        known = range(self.columns) if self.tokens is None else frozenset(self.tokens)
        return sum(token in known for token in ids) / len(ids) if ids else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that a report shows, without the lists of tokens."""
        return {name: getattr(self, name) for name in ("kind", "rows", "columns", "shared", "mask_token")}


def reconcile(target: Checkpoint, draft: Checkpoint, max_drafted: int = MAX_DRAFTED) -> Vocabulary:
    """Return how a draft can use the target's tokens; raise CheckpointError if it cannot use enough of them.

    Rows of the target that no token has are never drafted. Two fields of the draft's config.json matter:
    `draft_tokens`, the draft's own ids to which its head is limited, and `pard_token`, its mask. A head of more than
    `max_drafted` tokens keeps those of the lowest ids, which tokenizers give to the most frequent ones (FR-Spec,
    arXiv 2502.14856), and those that end a text.
    """
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    kind: Kind = "intersecting"
    if ours == theirs:
        kind = "identical" if target.vocab_size == draft.vocab_size else "padded"
        same = {token: token for token in ours.values()}
        sources = {row: row for row in range(min(target.token_rows, draft.vocab_size))}
    elif ours.keys() == theirs.keys():
        kind, same = "reordered", {token: theirs[text] for text, token in ours.items()}
        sources = dict(same)
    else:
        own, others = _Tokens(target), _Tokens(draft)
        same = _intersect(own, others)
        sources = same | {token: others.last(text) for token, (_, text) in own.meanings.items() if token not in same}
    usable = {row: token for token, row in reversed(same.items())}  # the first of several with one meaning
    _check_shared(target, draft, list(usable.values()))
    allowed = _draft_tokens(draft, theirs.values()) or frozenset(usable)
    if len(allowed) > max_drafted:
        allowed = frozenset(sorted(allowed)[:max_drafted]) | (allowed & set(draft.eos_token_ids()))
    tokens = sorted(token for row, token in usable.items() if row in allowed)
    if not tokens:
        raise CheckpointError(f"{draft.source}/config.json has draft_tokens that the target has not: distill it again")
    mask, rows = _mask(target, draft, sources)
    found = tuple(sources.get(row, -1) for row in range(rows))
    return Vocabulary(
        kind=kind,
        rows=rows,
        columns=len(tokens),
        tokens=None if len(tokens) == target.token_rows else tuple(tokens),
        shared=len(tokens),
        mask_token=mask,
        sources=None if found == tuple(range(draft.vocab_size)) else found,
    )


def trim(model: PreTrainedModel, checkpoint: Checkpoint, weights: dict[str, Weight] | None = None) -> Vocabulary:
    """Take the rows that no token has out of a model in place, and return the relation of what is left to its tokens.

    Rows past the last token leave the embedding and the head; rows between tokens leave the head alone. `weights` is as
    for `fit`.
    """
    tokens, rows = checkpoint.token_ids, checkpoint.token_rows
    own = Vocabulary(
        kind="identical",
        rows=rows,
        columns=len(tokens),
        tokens=None if len(tokens) == rows else tuple(tokens),
        shared=len(tokens),
        sources=None if rows == checkpoint.vocab_size else tuple(range(rows)),
    )
    fit(model, own, weights)
    return own


def fit(model: PreTrainedModel, vocabulary: Vocabulary, weights: dict[str, Weight] | None = None) -> None:
    """Change a model's embedding and head in place so that they use the target's token ids.

    A tied head stays tied if both need the same rows. Raises CheckpointError if the embedding or the head is of a kind
    that cannot be changed.

    Args:
        model: The model.
        vocabulary: The rows that it gets.
        weights: The weights of a model that has none itself, changed with it; None: the model's own are changed.
    """
    if vocabulary.sources is None and vocabulary.tokens is None and vocabulary.columns == vocabulary.rows:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise CheckpointError(f"{type(model).__name__} has no plain embedding and head: use another model")
    names = {module: name for name, module in model.named_modules()}
    tied = head.weight is embedding.weight
    known = of_model(model) if weights is None else weights
    every = np.arange(embedding.num_embeddings) if vocabulary.sources is None else np.array(vocabulary.sources)
    columns = every[: vocabulary.columns] if vocabulary.tokens is None else every[np.array(vocabulary.tokens)]
    stays = tied and vocabulary.tokens is None and vocabulary.columns == vocabulary.rows
    rows = Picked(known[f"{names[embedding]}.weight"], every)
    outputs = rows if stays else Picked(known[f"{names[head]}.weight"], columns)
    changed = {(embedding, "weight"): rows, (head, "weight"): outputs}
    if head.bias is not None:
        changed[head, "bias"] = Picked(known[f"{names[head]}.bias"], columns)
    for (module, key), weight in changed.items():
        name = f"{names[module]}.{key}"
        if weights is None:
            setattr(module, key, nn.Parameter(weight.read()))
        else:
            setattr(module, key, shape_only(weight.shape))
            weights[name] = weight
    if stays:
        head.weight = embedding.weight
    embedding.num_embeddings, embedding.padding_idx, head.out_features = vocabulary.rows, None, vocabulary.columns
    model.config.vocab_size, model.config.tie_word_embeddings = vocabulary.rows, stays


class _Tokens:
    """The tokens of a checkpoint's tokenizer and the bytes that they stand for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, tokenizer = checkpoint, checkpoint.tokenizer
        backend = tokenizer.backend_tokenizer
        self._model, self._unknown = backend.model, tokenizer.unk_token_id
        self._by_bytes = "ByteLevel" in f"{backend.pre_tokenizer} {backend.decoder}"
        added = tokenizer.added_tokens_decoder
        special = {token for token, each in added.items() if each.special} | set(tokenizer.all_special_ids)
        self.spare = set[int]()  # byte-fallback tokens of a tokenizer of characters
        self.meanings = dict[int, Meaning]()
        for text, token in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
            known = token in special or token in added
            self.meanings[token] = token in special, text.encode() if known else self._bytes(text, token)

    def _bytes(self, text: str, token: int) -> bytes:
        if self._by_bytes and all(character in _BYTES for character in text):
            return bytes(_BYTES[character] for character in text)
        if not self._by_bytes and (byte := _BYTE.fullmatch(text)):
            self.spare.add(token)
            return bytes.fromhex(byte[1])
        return text.replace("▁", " ").encode()  # SentencePiece's space

    @cached_property
    def ids(self) -> dict[Meaning, int]:
        """The token of each meaning: the lowest id, but a token in `spare` only if there is no other."""
        order = sorted(self.meanings, key=lambda token: (token in self.spare, token), reverse=True)
        return {self.meanings[token]: token for token in order}

    def last(self, text: bytes) -> int:
        """Return the last token into which this tokenizer splits `text`, or −1; half a character is split by bytes."""
        try:
            written = "".join(_CHARACTERS[b] for b in text) if self._by_bytes else text.decode().replace(" ", "▁")
            found = [each.id for each in self._model.tokenize(written)]
        except Exception:  # half a character; or a bare Exception of tokenizers for text that it cannot split
            found = [self.ids[False, bytes([b])] for b in text if (False, bytes([b])) in self.ids]
        return next((token for token in reversed(found) if token != self._unknown), -1)

    def roles(self) -> list[list[int]]:
        """Return the tokens that end a text, and a list of the one that begins it, if any."""
        begin = self.checkpoint.tokenizer.bos_token_id
        return [self.checkpoint.eos_token_ids(), [] if begin is None else [begin]]


def _intersect(ours: _Tokens, theirs: _Tokens) -> dict[int, int]:
    """Map each of our tokens to theirs of the same meaning, spare bytes last; then EOS and BOS tokens by their role."""
    order = sorted(ours.meanings, key=lambda token: token in ours.spare)
    same = {token: theirs.ids[ours.meanings[token]] for token in order if ours.meanings[token] in theirs.ids}
    for own, other in zip(ours.roles(), theirs.roles(), strict=True):
        same |= {token: other[0] for token in own if token not in same and other}
    return same


def _check_shared(target: Checkpoint, draft: Checkpoint, shared: Sequence[int]) -> None:
    """Raise CheckpointError if too few of the target's tokens, or of the tokens in PROMPTS, can be drafted."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    text = [token for ids in encode(target.tokenizer, [json.loads(line)["prompt"] for line in lines]) for token in ids]
    known, size = frozenset(shared), len(target.tokenizer)
    if len(known) < LEAST_SHARED * size or sum(token in known for token in text) < LEAST_COVERED * len(text):
        raise CheckpointError(
            f"target and draft have different vocabularies of {size} and {len(draft.tokenizer)} tokens, and share only "
            f"{len(known)}: use a draft with the target's tokenizer, or make one with specbuild distill"
        )


def _draft_tokens(draft: Checkpoint, known: Iterable[int]) -> frozenset[int] | None:
    """Return the tokens that the draft's config.json limits its head to, or None for all; raises CheckpointError."""
    asked = getattr(draft.config, DRAFT_TOKENS, None)
    if asked is None:
        return None
    where = f"{draft.source}/config.json has draft_tokens"
    if not isinstance(asked, list) or not asked or not all(type(token) is int for token in asked):
        raise CheckpointError(f"{where} that are no list of token ids: distill it again, or drop them")
    if len(set(asked)) < len(asked):
        raise CheckpointError(f"{where} of which some are there twice: distill it again, or drop them")
    if strange := set(asked) - set(known):
        raise CheckpointError(f"{where} with {min(strange)}, which is no token of its tokenizer: distill it again")
    return frozenset(asked)


def _mask(target: Checkpoint, draft: Checkpoint, sources: dict[int, int]) -> tuple[int | None, int]:
    """Return the id that a PARD draft's mask gets past the target's tokens, and the rows that the embedding needs.

    Adds the mask's row to `sources`. Raises CheckpointError if the mask is not a row of the draft's embedding.
    """
    mask, token = getattr(draft.config, PARD_TOKEN, None), target.token_rows
    if mask is None:
        return None, token
    if type(mask) is not int or not 0 <= mask < draft.vocab_size:
        raise CheckpointError(
            f"{draft.source}/config.json has pard_token {shown(mask)}, which is none of its {draft.vocab_size} rows: "
            "give the id of its mask token"
        )
    sources[token] = mask
    return token, token + 1


def reference_logits(checkpoint: Checkpoint, texts: Sequence[Sequence[int]]) -> LogitsFile:
    """Return the logits that Hugging Face's modules compute in float32 after each token of texts, a layer at a time.

    They are `float32[T, rows]` by token, LOWEST where a row is no token's.
    """
    known, rows = np.array(checkpoint.token_ids), checkpoint.token_rows
    found = LayeredModel(*model_of(checkpoint)).logits(texts)
    return LogitsFile(np.where(np.isin(np.arange(rows), known), each[:, :rows], np.float32(LOWEST)) for each in found)


@contextmanager
def by_token(model: PreTrainedModel, tokens: Sequence[int] | None, vocab_size: int) -> Iterator[None]:
    """Make a model whose head has only `tokens` return logits for all rows, LOWEST for the others, while inside."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        full = output.logits.new_full((*output.logits.shape[:-1], vocab_size), LOWEST)
        full[..., list(tokens or ())] = output.logits
        output.logits = full
        return output

    handle = model.register_forward_hook(hook) if tokens else None
    try:
        yield
    finally:
        if handle:
            handle.remove()
