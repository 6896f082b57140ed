"""A draft made to take the target's token ids and to answer in them, whatever its own tokenizer is.

Tokens of different tokenizers are the same where they stand for the same bytes. The draft's head keeps the rows of
those that both have: it drafts among them alone, and nothing is translated when it runs. That is the token-level
intersection (TLI) of arXiv 2502.05202. The text stays as the target cuts it, so the draft also reads tokens that it
does not have: each becomes the last of the pieces that the draft's own tokenizer makes of it. Their mean, by length or
by position or not, was accepted less often on the reference pair with six other tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from specbuild.measure.tuning.measure import PROMPTS
from specbuild.runtime.errors import CheckpointError, shown

from .checkpoint import Checkpoint, encode

Kind = Literal["identical", "padded", "reordered", "intersecting"]
Meaning = tuple[bool, bytes]  # whether it is a special token, and what it stands for
DRAFT_TOKENS, PARD_TOKEN = "draft_tokens", "pard_token"  # of config.json: a trimmed head's tokens, a mask's id
LEAST_SHARED = 0.01  # of the target's tokens, and
LEAST_COVERED = 0.1  # of a text's, that a draft must have to be worth an attempt
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_CHARACTERS: dict[int, str] = bytes_to_unicode()  # what byte-level tokenizers write for each byte
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


@dataclass(frozen=True)
class Vocabulary:
    """How a draft's tokens stand to the target's.

    kind: "identical"; "padded", the same with other numbers of rows; "reordered", the same tokens with other ids;
    "intersecting", of another tokenizer. rows: of the embedding after `fit`, the target's or one more. columns: of the
    head. tokens: the columns' target ids, ascending; None where column i is token i. shared: how many of the target's
    tokens can be drafted. mask_token: the id by which a PARD draft's mask is fed, which no text has. sources: for each
    row of the embedding the draft's row that it becomes, −1 for the mean of all; None where all stay as they are.
    """

    kind: Kind
    rows: int
    columns: int
    tokens: tuple[int, ...] | None = field(repr=False)
    shared: int
    mask_token: int | None = None
    sources: tuple[int, ...] | None = field(default=None, repr=False)

    def covered(self, ids: Sequence[int]) -> float:
        """The share of a text's tokens, as the target has them, that can be drafted; 1 of no text."""
        known = range(self.columns) if self.tokens is None else frozenset(self.tokens)
        return sum(token in known for token in ids) / len(ids) if ids else 1.0

    def to_dict(self) -> dict[str, Any]:
        """For reports, without the lists of tokens."""
        return {name: getattr(self, name) for name in ("kind", "rows", "columns", "shared", "mask_token")}


def reconcile(target: Checkpoint, draft: Checkpoint) -> Vocabulary:
    """How a draft can take the target's tokens; raises CheckpointError where it cannot, or hardly any.

    Of the draft's config.json count `draft_tokens`, the only ids of its own whose head rows are used, and `pard_token`.
    """
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    kind: Kind = "intersecting"
    if ours == theirs:
        kind = "identical" if target.vocab_size == draft.vocab_size else "padded"
        same = {token: token for token in ours.values()}
        sources = {row: row for row in range(min(target.vocab_size, draft.vocab_size))}
    elif ours.keys() == theirs.keys():
        kind, same = "reordered", {token: theirs[text] for text, token in ours.items()}
        sources = dict(same)
    else:
        own, others = _Tokens(target), _Tokens(draft)
        same = _intersect(own, others)
        sources = same | {token: others.last(text) for token, (_, text) in own.meanings.items() if token not in same}
    usable = {row: token for token, row in reversed(same.items())}  # of several of one meaning the first
    _check_shared(target, draft, list(usable.values()))
    allowed = _draft_tokens(draft, theirs.values())
    tokens = sorted(token for row, token in usable.items() if allowed is None or row in allowed)
    if not tokens:
        raise CheckpointError(f"{draft.source}/config.json has draft_tokens that the target has not: distill it again")
    mask, rows = _mask(target, draft, ours.values(), sources)
    found = tuple(sources.get(row, -1) for row in range(rows))
    return Vocabulary(
        kind=kind,
        rows=rows,
        columns=target.vocab_size if len(tokens) == len(ours) else len(tokens),
        tokens=None if len(tokens) == len(ours) else tuple(tokens),
        shared=len(tokens),
        mask_token=mask,
        sources=None if found == tuple(range(draft.vocab_size)) else found,
    )


def fit(model: PreTrainedModel, vocabulary: Vocabulary) -> None:
    """Give a draft the target's tokens: `vocabulary.rows` rows of its embedding, and `columns` of its head.

    A model whose head is its embedding stays one where both need the same rows. Raises CheckpointError for a model
    whose embedding or head is of a kind that cannot be changed.
    """
    if vocabulary.sources is None and vocabulary.tokens is None and vocabulary.columns == vocabulary.rows:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise CheckpointError(f"{type(model).__name__} has no plain embedding and head: use another draft")
    tied = head.weight is embedding.weight
    columns = slice(vocabulary.columns) if vocabulary.tokens is None else torch.tensor(vocabulary.tokens)
    with torch.no_grad():
        rows, out = (_rows(weight, vocabulary.sources) for weight in (embedding.weight, head.weight))
        bias = None if head.bias is None else _rows(head.bias[:, None], vocabulary.sources)[columns, 0]
        embedding.weight = nn.Parameter(rows)
        tied = tied and vocabulary.tokens is None and vocabulary.columns == vocabulary.rows
        head.weight = embedding.weight if tied else nn.Parameter(out[columns].clone())
        head.bias = None if bias is None else nn.Parameter(bias.clone())
    embedding.num_embeddings, embedding.padding_idx, head.out_features = vocabulary.rows, None, vocabulary.columns
    model.config.vocab_size, model.config.tie_word_embeddings = vocabulary.rows, tied


def _rows(weight: Tensor, sources: tuple[int, ...] | None) -> Tensor:
    """`[rows, H]` of `[V, H]`."""
    if sources is None:
        return weight
    index = torch.tensor(sources)
    rows = weight[index]
    rows[index < 0] = weight.mean(0)
    return rows


class _Tokens:
    """What each token of a checkpoint's tokenizer stands for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, tokenizer = checkpoint, checkpoint.tokenizer
        backend = tokenizer.backend_tokenizer
        self._model, self._unknown = backend.model, tokenizer.unk_token_id
        self._by_bytes = "ByteLevel" in f"{backend.pre_tokenizer} {backend.decoder}"
        added = tokenizer.added_tokens_decoder
        special = {token for token, each in added.items() if each.special} | set(tokenizer.all_special_ids)
        self.spare = set[int]()  # single bytes of a tokenizer that otherwise has characters
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
        """The token of each meaning: of several one that is no spare byte, the lowest."""
        order = sorted(self.meanings, key=lambda token: (token in self.spare, token), reverse=True)
        return {self.meanings[token]: token for token in order}

    def last(self, text: bytes) -> int:
        """The last of the tokens into which this tokenizer cuts it, by bytes where it is half a character; or −1."""
        try:
            written = "".join(_CHARACTERS[b] for b in text) if self._by_bytes else text.decode().replace(" ", "▁")
            found = [each.id for each in self._model.tokenize(written)]
        except Exception:  # half a character, or bare Exception of the library's for what it cannot cut
            found = [self.ids[False, bytes([b])] for b in text if (False, bytes([b])) in self.ids]
        return next((token for token in reversed(found) if token != self._unknown), -1)

    def roles(self) -> list[list[int]]:
        """The tokens that end a text, and the one that begins it."""
        begin = self.checkpoint.tokenizer.bos_token_id
        return [self.checkpoint.eos_token_ids(), [] if begin is None else [begin]]


def _intersect(ours: _Tokens, theirs: _Tokens) -> dict[int, int]:
    """Their token of each of ours that means the same; after all others our spare bytes, and what has the same role."""
    order = sorted(ours.meanings, key=lambda token: token in ours.spare)
    same = {token: theirs.ids[ours.meanings[token]] for token in order if ours.meanings[token] in theirs.ids}
    for own, other in zip(ours.roles(), theirs.roles(), strict=True):
        same |= {token: other[0] for token in own if token not in same and other}
    return same


def _check_shared(target: Checkpoint, draft: Checkpoint, shared: Sequence[int]) -> None:
    """Raises CheckpointError where too few of the target's tokens, or of a text's, can be drafted."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    text = [token for ids in encode(target.tokenizer, [json.loads(line)["prompt"] for line in lines]) for token in ids]
    known, size = frozenset(shared), len(target.tokenizer)
    if len(known) < LEAST_SHARED * size or sum(token in known for token in text) < LEAST_COVERED * len(text):
        raise CheckpointError(
            f"target and draft have different vocabularies of {size} and {len(draft.tokenizer)} tokens, and share only "
            f"{len(known)}: use a draft with the target's tokenizer, or make one with specbuild distill"
        )


def _draft_tokens(draft: Checkpoint, known: Iterable[int]) -> frozenset[int] | None:
    """Those that its configuration allows; None for all. Raises CheckpointError."""
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


def _mask(
    target: Checkpoint, draft: Checkpoint, known: Iterable[int], sources: dict[int, int]
) -> tuple[int | None, int]:
    """A PARD draft's mask as an id beyond the target's tokens, put among `sources`; and the rows that this takes.

    Raises CheckpointError for a mask that is no row of the draft's.
    """
    mask = getattr(draft.config, PARD_TOKEN, None)
    if mask is None:
        return None, target.vocab_size
    if type(mask) is not int or not 0 <= mask < draft.vocab_size:
        raise CheckpointError(
            f"{draft.source}/config.json has pard_token {shown(mask)}, which is none of its {draft.vocab_size} rows: "
            "give the id of its mask token"
        )
    first = max(known) + 1
    token = mask if first <= mask < target.vocab_size else first
    sources[token] = mask
    return token, max(target.vocab_size, token + 1)


def spread(logits: Tensor, tokens: Tensor, size: int) -> Tensor:
    """Logits `[..., n]` of these tokens `int64[n]` as those of all, `[..., size]`: −inf for the others."""
    full = logits.new_full((*logits.shape[:-1], size), -torch.inf)
    full[..., tokens] = logits
    return full


@contextmanager
def by_token(model: PreTrainedModel, tokens: Sequence[int] | None, vocab_size: int) -> Iterator[None]:
    """While inside, a model whose head has but these tokens gives logits of all, −inf of the others."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        output.logits = spread(output.logits, columns, vocab_size)
        return output

    columns = torch.tensor(tokens or (), dtype=torch.int64)

    handle = model.register_forward_hook(hook) if tokens else None
    try:
        yield
    finally:
        if handle:
            handle.remove()
