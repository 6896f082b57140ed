"""Vocabularies: which tokens of two tokenizers are the same, and that a fitted draft computes what it did before."""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from other_tokenizers import END, byte_level, edit, give, sentencepiece
from small_models import random_model

from specbuild.builder.frontend.checkpoint import Checkpoint, find, load
from specbuild.builder.frontend.vocabulary import Vocabulary, by_token, fit, reconcile, trim
from specbuild.runtime.errors import CheckpointError

Make = Callable[..., Path]
WORDS = ["▁the", "▁self", "▁return", "é", "Ω", "▁", "(", "):", "▁=", "es", "s", "\n"]


@pytest.fixture(scope="module")
def target(pair: Path) -> Checkpoint:
    return find(str(pair / "target"))


@pytest.fixture(scope="module")
def own(make_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft with the target's tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("drafts") / "own", num_hidden_layers=1, tie_word_embeddings=True)


@pytest.fixture
def folder(own: Path, tmp_path: Path) -> Path:
    """A draft to change."""
    return Path(shutil.copytree(own, tmp_path / "draft"))


@pytest.fixture(scope="module")
def other(make_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A random, untied draft with a byte-level tokenizer of its own."""
    tokenizer = byte_level(700, argparse)
    folder = make_checkpoint(tmp_path_factory.mktemp("drafts") / "other", vocab_size=700, num_hidden_layers=1)
    return find(str(give(folder, tokenizer)))


@pytest.fixture(scope="module")
def pieces(make_checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A random draft with a tokenizer as SentencePiece writes it."""
    tokenizer = sentencepiece(WORDS)
    size = tokenizer.get_vocab_size()
    folder = make_checkpoint(tmp_path_factory.mktemp("drafts") / "pieces", vocab_size=size, num_hidden_layers=1)
    return find(str(give(folder, tokenizer, "</s>", unk_token="<unk>", bos_token="<s>")))


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def fitted(draft: Checkpoint, vocabulary: Vocabulary) -> Any:
    model = load(draft, "eager")
    fit(model, vocabulary)
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == vocabulary.rows
    assert len(model.get_output_embeddings().weight) == vocabulary.columns
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings == tied
    return model


def sources_by_text(target: Checkpoint, draft: Checkpoint) -> dict[str, str | None]:
    """Each of the target's tokens, as text, and what of the draft's it becomes."""
    found = reconcile(target, draft).sources
    assert found is not None
    texts = {token: text for text, token in draft.tokenizer.get_vocab().items()}
    return {text: texts.get(found[token]) for text, token in target.tokenizer.get_vocab().items()}


def test_the_same_vocabulary_is_left_as_it_is(target: Checkpoint, own: Path) -> None:
    found = reconcile(target, find(str(own)))
    assert found == Vocabulary("identical", rows=4096, columns=4096, tokens=None, shared=4096)
    assert found.covered([0, 4095]) == found.covered([]) == 1.0
    model = load(find(str(own)), "eager")
    before = model.get_input_embeddings().weight
    fit(model, found)
    assert model.get_input_embeddings().weight is before


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("rows", "drafts"), [(4096, 4160), (4160, 4160), (4160, 4200)])
def test_rows_past_the_last_token_are_dropped(
    make_checkpoint: Make, tmp_path: Path, rows: int, drafts: int, tied: bool
) -> None:
    fields = {"num_hidden_layers": 1, "tie_word_embeddings": tied}
    target = find(str(make_checkpoint(tmp_path / "target", vocab_size=rows, **fields)))
    draft = find(str(make_checkpoint(tmp_path / "draft", vocab_size=drafts, **fields)))
    found = reconcile(target, draft)
    kind = "identical" if rows == drafts else "padded"
    assert (found.kind, found.rows, found.columns, found.shared) == (kind, 4096, 4096, 4096)
    model, ids = fitted(draft, found), [5, 4095, 17, 0]
    assert model.config.tie_word_embeddings == tied
    torch.testing.assert_close(logits(model, ids), logits(load(draft, "eager"), ids)[:, :4096])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("gone", [(), (300, 4000, 4095)], ids=len)
def test_a_target_keeps_what_is_a_token_or_ends_a_text(
    make_checkpoint: Make, tmp_path: Path, tied: bool, gone: tuple[int, ...]
) -> None:
    fields = {"num_hidden_layers": 1, "tie_word_embeddings": tied, "eos_token_id": [0, 4101], "vocab_size": 4160}
    checkpoint = find(str(without(make_checkpoint(tmp_path / "target", **fields), *gone)))
    model, ids = load(checkpoint, "eager"), [5, 4094, 17, 0]
    left, before = sorted({*range(4096), 4101} - {*gone}), logits(model, ids)
    found = trim(model, checkpoint)
    assert (found.tokens, found.rows, found.columns) == (tuple(left), 4102, len(left))
    torch.testing.assert_close(logits(model, ids), before[:, left])
    with by_token(model, found.tokens, found.rows):
        full = logits(model, ids)
    torch.testing.assert_close(full[:, left], before[:, left])
    assert full.shape == (4, 4102)
    assert (full[:, sorted({*range(4102)} - {*left})] < full[:, left].min() - 1000).all()


def test_a_draft_has_no_row_of_no_token(make_checkpoint: Make, tmp_path: Path) -> None:
    """Neither one past the last token nor one between two."""
    folders = [make_checkpoint(tmp_path / each, vocab_size=4160, num_hidden_layers=1) for each in ("target", "draft")]
    found = reconcile(*(find(str(without(folder, 300))) for folder in folders))
    assert found.tokens == tuple(sorted({*range(4096)} - {300}))
    assert (found.rows, found.columns, found.shared) == (4096, 4095, 4095)


def test_other_ids_are_put_in_order(target: Checkpoint, folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    moved = list(range(4096))
    random.Random(0).shuffle(moved)
    content["model"]["vocab"] = {text: moved[token] for text, token in content["model"]["vocab"].items()}
    content["added_tokens"][0]["id"] = moved[0]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    draft = find(str(folder))
    found = reconcile(target, draft)
    assert (found.kind, found.shared, found.tokens, found.sources) == ("reordered", 4096, None, tuple(moved))
    model, ids = fitted(draft, found), [0, 4095, 300, 17]
    assert model.config.tie_word_embeddings
    assert (draft.config.vocab_size, draft.config.tie_word_embeddings) == (4096, True)
    before = logits(load(draft, "eager"), [moved[token] for token in ids])
    torch.testing.assert_close(logits(model, ids), before[:, moved])


def test_a_draft_of_another_tokenizer_says_what_it_did(target: Checkpoint, other: Checkpoint) -> None:
    found = reconcile(target, other)
    assert (found.kind, found.rows) == ("intersecting", 4096)
    assert found.tokens is not None
    assert found.sources is not None
    assert found.shared == found.columns == len(found.tokens) > 500
    assert list(found.tokens) == sorted(set(found.tokens))
    assert found.tokens[0] == 0  # what ends a text, though it is called otherwise
    model = fitted(other, found)
    theirs = [found.sources[token] for token in found.tokens]
    names, vocab = {token: text for text, token in target.tokenizer.get_vocab().items()}, other.tokenizer.get_vocab()
    assert theirs[0] == vocab[END]
    assert theirs[1:] == [vocab[names[token]] for token in found.tokens[1:]]
    text = [found.tokens[place] for place in (5, 0, 300, 499, 42)]
    before = logits(load(other, "eager"), [found.sources[token] for token in text])
    torch.testing.assert_close(logits(model, text), before[:, theirs])
    assert found.covered(text) == 1.0
    missing = next(token for token in range(4096) if token not in found.tokens)
    assert found.covered([*text, missing, missing, missing]) == 5 / 8


def test_two_alphabets_are_one_in_bytes(target: Checkpoint, pieces: Checkpoint) -> None:
    found = sources_by_text(target, pieces)
    same = {"Ġthe": "▁the", "Ġself": "▁self", "):": "):", "Ċ": "\n", "Ġ": "▁", "s": "s", "Q": "<0x51>"}
    same |= {"Ã": "<0xC3>", "ĉ": "<0x09>", "<|endoftext|>": "</s>"}
    assert {text: found[text] for text in same} == same
    assert (found["Ġimport"], found["Ġkey"]) == ("t", "<0x79>")  # of what it has no piece for, the last byte
    assert None not in found.values()
    back = sources_by_text(pieces, target)
    assert {back[theirs]: theirs for theirs in same.values()} == {**same, "<|endoftext|>": "</s>"}
    assert (back["é"], back["<0x0A>"]) == ("©", "Ċ")
    usable = reconcile(pieces, target).tokens
    assert usable is not None
    vocab = pieces.tokenizer.get_vocab()
    assert vocab["\n"] in usable
    assert vocab["<0x0A>"] not in usable  # it means the same, and nobody writes it


def test_special_tokens_are_none_of_the_text(target: Checkpoint, folder: Path) -> None:
    tokenizer = byte_level(700, argparse)
    tokenizer.add_special_tokens(["<|endoftext|>", "Ġself"])
    give(folder, tokenizer)
    draft = find(str(folder))
    assert sources_by_text(target, draft)["<|endoftext|>"] == "<|endoftext|>"  # by name, whatever ends its texts
    usable, vocab = reconcile(target, draft).tokens or (), target.tokenizer.get_vocab()
    assert vocab["Ġself"] not in usable
    assert vocab["<|endoftext|>"] in usable
    folder = Path(shutil.copytree(folder, folder.parent / "plain"))
    tokenizer = byte_level(700, argparse)
    tokenizer.add_tokens(["<|endoftext|>", " += "])
    give(folder, tokenizer)
    assert sources_by_text(target, find(str(folder)))["<|endoftext|>"] == END  # by role: of that name it is text


def test_a_trimmed_head(target: Checkpoint, folder: Path) -> None:
    draft = find(str(edit(folder, draft_tokens=[900, 0, 4095])))
    found = reconcile(target, draft)
    assert (found.kind, found.tokens, found.sources, found.shared) == ("identical", (0, 900, 4095), None, 3)
    model, ids = fitted(draft, found), [7, 8, 9]
    assert not model.config.tie_word_embeddings
    torch.testing.assert_close(logits(model, ids), logits(load(draft, "eager"), ids)[:, [0, 900, 4095]])


@pytest.mark.parametrize("tokens", ["0", [], [0, True], [0, 1.0], [3, 1, 3], [0, 4096], [-1]], ids=str)
def test_a_trimmed_head_that_makes_no_sense(target: Checkpoint, folder: Path, tokens: Any) -> None:
    with pytest.raises(CheckpointError, match="draft_tokens") as caught:
        reconcile(target, find(str(edit(folder, draft_tokens=tokens))))
    assert "\n" not in str(caught.value)


def test_a_trimmed_head_of_what_the_target_has_not(target: Checkpoint, other: Checkpoint, tmp_path: Path) -> None:
    strange = sorted(set(range(700)) - set(reconcile(target, other).sources or ()))[:3]
    folder = Path(shutil.copytree(other.folder, tmp_path / "draft"))
    with pytest.raises(CheckpointError, match="that the target has not: distill it again"):
        reconcile(target, find(str(edit(folder, draft_tokens=strange))))


@pytest.mark.parametrize(
    ("rows", "drafts", "mask"),
    [
        (4096, 4160, 4100),
        (4160, 4160, 4100),
        (4160, 4160, 9),  # of a token that texts have
    ],
)
def test_a_mask_token(make_checkpoint: Make, tmp_path: Path, rows: int, drafts: int, mask: int) -> None:
    """It is the row that follows the tokens'."""
    target = find(str(make_checkpoint(tmp_path / "target", vocab_size=rows, num_hidden_layers=1)))
    folder = make_checkpoint(tmp_path / "draft", vocab_size=drafts, num_hidden_layers=1, tie_word_embeddings=True)
    draft = find(str(edit(folder, pard_token=mask)))
    found = reconcile(target, draft)
    assert (found.mask_token, found.rows, found.columns) == (4096, 4097, 4096)
    model = fitted(draft, found)
    before, after = logits(load(draft, "eager"), [5, mask, mask]), logits(model, [5, 4096, 4096])
    torch.testing.assert_close(after, before[:, :4096])


@pytest.mark.parametrize("mask", [4096, "4000", True])
def test_a_mask_token_that_is_none(target: Checkpoint, folder: Path, mask: Any) -> None:
    with pytest.raises(CheckpointError, match=r"pard_token .*none of its 4096 rows: give the id"):
        reconcile(target, find(str(edit(folder, pard_token=mask))))


def test_too_little_in_common(target: Checkpoint, folder: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"def": 0, "Fuchs": 1, END: 2}, "Fuchs"))
    words.add_special_tokens([tokenizers.AddedToken(END, special=True)])
    with pytest.raises(CheckpointError, match="of 4096 and 3 tokens, and share only 2: use a draft with the target's"):
        reconcile(target, find(str(give(folder, words))))


@pytest.mark.parametrize("family", ["gemma2", "gptj"])  # scaled embeddings and soft-capped logits; a head with biases
def test_a_model_of_another_family(family: str) -> None:
    order, ids = [3, 90, 41, 2, 96], [0, 4, 2, 2]
    model = random_model(family)
    before = logits(model, [order[token] for token in ids])
    found = Vocabulary("intersecting", 5, 3, (0, 2, 4), 3, sources=tuple(order))
    fit(model, found)
    torch.testing.assert_close(logits(model, ids), before[:, [3, 41, 96]])
    assert (model.lm_head.bias is None) == (family == "gemma2")
    model = random_model(family)
    fit(model, replace(found, columns=5, tokens=None))
    torch.testing.assert_close(logits(model, ids), before[:, order])
    assert model.config.tie_word_embeddings == (family == "gemma2")


def without(folder: Path, *gone: int) -> Path:
    """Take tokens out of a checkpoint's tokenizer."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["merges"] = []
    content["model"]["vocab"] = {text: id_ for text, id_ in content["model"]["vocab"].items() if id_ not in gone}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_a_model_that_cannot_be_fitted() -> None:
    model = random_model("llama")
    model.lm_head = torch.nn.Identity()
    with pytest.raises(CheckpointError, match="no plain embedding and head: use another model"):
        fit(model, Vocabulary("reordered", 2, 2, None, 2, sources=(1, 0)))
