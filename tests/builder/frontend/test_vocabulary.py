"""Vocabularies: which tokens of two tokenizers are the same, and that a fitted draft computes what it did before."""

import argparse
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from other_tokenizers import END, byte_level, edit, give, sentencepiece
from small_models import random_model

from specbuild.builder.frontend.checkpoint import find, load
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.lazy_weights import of_model
from specbuild.builder.frontend.vocabulary import Vocabulary, by_token, fit, reconcile, trim
from specbuild.runtime.errors import CheckpointError

WORDS = ["▁the", "▁self", "▁return", "é", "Ω", "▁", "(", "):", "▁=", "es", "s", "\n"]


@pytest.fixture(scope="module")
def target(pair):
    return find(str(pair / "target"))


@pytest.fixture
def folder(make_checkpoint, tmp_path):
    """A draft with the target's tokenizer."""
    return make_checkpoint(tmp_path / "draft", num_hidden_layers=1)


@pytest.fixture(scope="module")
def draft(make_checkpoint, tmp_path_factory):
    """`draft(tokenizer, end, **roles)`: a random, untied draft with a tokenizer of its own."""

    def make(tokenizer, end=END, **roles):
        size, folder = tokenizer.get_vocab_size(), tmp_path_factory.mktemp("drafts") / "draft"
        return find(str(give(make_checkpoint(folder, vocab_size=size, num_hidden_layers=1), tokenizer, end, **roles)))

    return make


@pytest.fixture(scope="module")
def other(draft):
    """A draft with a byte-level tokenizer of its own."""
    return draft(byte_level(700, argparse))


@pytest.fixture(scope="module")
def pieces(draft):
    """A draft with a tokenizer as SentencePiece writes it."""
    return draft(sentencepiece(WORDS), "</s>", unk_token="<unk>", bos_token="<s>")


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def sources_by_text(target, draft):
    """Each of the target's tokens, as text, and what of the draft's it becomes."""
    found = reconcile(target, draft).sources
    assert found is not None
    texts = {token: text for text, token in draft.tokenizer.get_vocab().items()}
    return {text: texts.get(found[token]) for text, token in target.tokenizer.get_vocab().items()}


@pytest.mark.parametrize(
    ("rows", "drafts", "kind"),
    [(4096, 4096, "identical"), (4160, 4160, "identical"), (4096, 4160, "padded"), (4160, 4200, "padded")],
)
def test_rows_past_the_last_token_are_dropped(make_checkpoint, tmp_path, rows, drafts, kind):
    pair = (make_checkpoint(tmp_path / str(size), vocab_size=size, num_hidden_layers=1) for size in (rows, drafts))
    sources = None if drafts == 4096 else tuple(range(4096))
    assert reconcile(*(find(str(each)) for each in pair)) == Vocabulary(kind, 4096, 4096, None, 4096, None, sources)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("gone", [(), (300, 4000, 4095)], ids=len)
def test_a_target_keeps_what_is_a_token_or_ends_a_text(make_checkpoint, tmp_path, tied, gone):
    fields = {"num_hidden_layers": 1, "tie_word_embeddings": tied, "eos_token_id": [0, 4101], "vocab_size": 4160}
    checkpoint = find(str(without(make_checkpoint(tmp_path / "target", **fields), *gone)))
    model, ids = load(checkpoint, "eager"), [5, 4094, 17, 0]
    left, before = sorted({*range(4096), 4101} - {*gone}), logits(model, ids)
    found = trim(model, checkpoint)
    assert (found.tokens, found.rows, found.columns) == (tuple(left), 4102, len(left))
    torch.testing.assert_close(logits(model, ids), before[:, left])
    by_layers = LayeredModel(model, of_model(model), found.tokens, found.rows).logits([ids])[0]
    with by_token(model, found.tokens, found.rows):
        full = logits(model, ids)
    np.testing.assert_allclose(by_layers, full.numpy(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(full[:, left], before[:, left])
    assert (full[:, sorted({*range(4102)} - {*left})] < full[:, left].min() - 1000).all()
    assert reconcile(checkpoint, checkpoint).tokens == tuple(token for token in left if token < 4096)


def test_other_ids_are_put_in_order(target, folder):
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    moved = list(range(4096))
    random.Random(0).shuffle(moved)
    content["model"]["vocab"] = {text: moved[token] for text, token in content["model"]["vocab"].items()}
    content["added_tokens"][0]["id"] = moved[0]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    expected = Vocabulary("reordered", 4096, 4096, None, 4096, sources=tuple(moved))
    assert reconcile(target, find(str(folder))) == expected


def test_a_draft_of_another_tokenizer_has_the_tokens_of_the_same_text(target, other):
    found = reconcile(target, other)
    assert (found.kind, found.rows) == ("intersecting", 4096)
    tokens, sources = found.tokens or (), found.sources or ()
    assert found.shared == found.columns == len(tokens) > 500
    assert list(tokens) == sorted(set(tokens))
    names, vocab = {token: text for text, token in target.tokenizer.get_vocab().items()}, other.tokenizer.get_vocab()
    assert (tokens[0], sources[0]) == (0, vocab[END])  # what ends a text, though it is called otherwise
    assert all(sources[token] == vocab[names[token]] for token in tokens[1:])
    missing = next(token for token in range(4096) if token not in tokens)
    assert found.covered([*tokens[:5], missing, missing, missing]) == 5 / 8


def test_two_alphabets_are_one_in_bytes(target, pieces):
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


def test_special_tokens_are_none_of_the_text(target, draft):
    tokenizer, plain = byte_level(700, argparse), byte_level(700, argparse)
    tokenizer.add_special_tokens(["<|endoftext|>", "Ġself"])
    special = draft(tokenizer)
    assert sources_by_text(target, special)["<|endoftext|>"] == "<|endoftext|>"  # by name, whatever ends its texts
    usable, vocab = reconcile(target, special).tokens or (), target.tokenizer.get_vocab()
    assert vocab["Ġself"] not in usable
    assert vocab["<|endoftext|>"] in usable
    plain.add_tokens(["<|endoftext|>", " += "])
    assert sources_by_text(target, draft(plain))["<|endoftext|>"] == END  # by role: of that name it is text


def test_a_trimmed_head(target, folder):
    found = reconcile(target, find(str(edit(folder, draft_tokens=[900, 0, 4095]))))
    assert found == Vocabulary("identical", 4096, 3, (0, 900, 4095), 3)
    assert found.covered([]) == 1.0


def test_a_large_head_keeps_the_lowest_ids_and_those_that_end_a_text(target, folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 4000]}')
    draft = find(str(folder))
    assert reconcile(target, draft, 50).tokens == (*range(50), 4000)
    limited = find(str(edit(folder, draft_tokens=[4000, *range(100, 200)])))
    assert reconcile(target, limited, 50).tokens == (*range(100, 150), 4000)
    assert reconcile(target, draft, 4096).tokens is None


@pytest.mark.parametrize("tokens", ["0", [], [0, True], [0, 1.0], [3, 1, 3], [0, 4096], [-1]], ids=str)
def test_a_trimmed_head_that_makes_no_sense(target, folder, tokens):
    with pytest.raises(CheckpointError, match="draft_tokens") as caught:
        reconcile(target, find(str(edit(folder, draft_tokens=tokens))))
    assert "\n" not in str(caught.value)


def test_a_trimmed_head_of_what_the_target_has_not(target, other, tmp_path):
    strange = sorted(set(range(700)) - set(reconcile(target, other).sources or ()))[:3]
    folder = Path(shutil.copytree(other.folder, tmp_path / "draft"))
    with pytest.raises(CheckpointError, match="that the target has not: distill it again"):
        reconcile(target, find(str(edit(folder, draft_tokens=strange))))


@pytest.mark.parametrize("mask", [4100, 9])  # a row that no token has; a token that texts have
def test_a_mask_token_is_the_row_that_follows_the_tokens(target, make_checkpoint, tmp_path, mask):
    draft = edit(make_checkpoint(tmp_path / "draft", vocab_size=4160, num_hidden_layers=1), pard_token=mask)
    found = reconcile(target, find(str(draft)))
    assert found == Vocabulary("padded", 4097, 4096, None, 4096, 4096, (*range(4096), mask))


@pytest.mark.parametrize("mask", [4096, "4000", True])
def test_a_mask_token_that_is_none(target, folder, mask):
    with pytest.raises(CheckpointError, match=r"pard_token .*none of its 4096 rows: give the id"):
        reconcile(target, find(str(edit(folder, pard_token=mask))))


def test_too_little_in_common(target, folder):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"def": 0, "Fuchs": 1, END: 2}, "Fuchs"))
    words.add_special_tokens([tokenizers.AddedToken(END, special=True)])
    with pytest.raises(CheckpointError, match="of 4096 and 3 tokens, and share only 2: use a draft with the target's"):
        reconcile(target, find(str(give(folder, words))))


def without(folder, *gone):
    """Take tokens out of a checkpoint's tokenizer."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["merges"] = []
    content["model"]["vocab"] = {text: id_ for text, id_ in content["model"]["vocab"].items() if id_ not in gone}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@settings(max_examples=25)
@given(
    st.sampled_from(["llama", "tied", "gemma2", "gptj"]),  # with scaled embeddings, and a head with biases
    st.permutations(range(97)),
    st.integers(3, 97),
    st.sets(st.integers(0, 96), max_size=40),
    st.booleans(),
)
def test_a_fitted_draft_says_of_our_tokens_what_it_said_of_its_own(family, order, rows, known, mask):
    model = model_of(family)
    tokens, ids = sorted(token for token in known if token < rows), [0, rows - 1, 1, 2]
    before, tied = logits(model, [order[token] for token in ids]), model.config.tie_word_embeddings
    columns = len(tokens) or rows - mask
    fit(model, Vocabulary("intersecting", rows, columns, tuple(tokens) or None, columns, sources=tuple(order[:rows])))
    torch.testing.assert_close(logits(model, ids), before[:, [order[token] for token in tokens or range(columns)]])
    assert len(model.get_input_embeddings().weight) == model.config.vocab_size == rows
    shared = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert shared == model.config.tie_word_embeddings == (tied and columns == rows)


def model_of(family):
    return random_model(
        "llama" if family == "tied" else family, num_hidden_layers=1, tie_word_embeddings=family in ("tied", "gemma2")
    )


def test_a_token_that_is_nothing_like_the_drafts_is_the_mean_of_its_own():
    model = model_of("llama")
    mean = model.get_input_embeddings().weight.mean(0)
    fit(model, Vocabulary("intersecting", 2, 2, None, 2, sources=(-1, 5)))
    torch.testing.assert_close(model.get_input_embeddings().weight[0], mean)


def test_a_model_that_cannot_be_fitted():
    model = random_model("llama")
    model.lm_head = torch.nn.Identity()
    with pytest.raises(CheckpointError, match="no plain embedding and head: use another model"):
        fit(model, Vocabulary("reordered", 2, 2, None, 2, sources=(1, 0)))
