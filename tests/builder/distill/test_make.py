"""A plan makes the student that was asked for, and refuses drafts that cannot be gone on with."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from other_tokenizers import edit
from transformers import MistralConfig

from specbuild.builder.distill.make import Plan, files_of_tokenizer, frequent
from specbuild.builder.frontend import checkpoint as checkpoints
from specbuild.runtime.errors import CheckpointError, InputError, OptionError


@pytest.mark.parametrize("kind", ["chain", "parallel"])
def test_of_the_targets_shape_it_begins_as_the_target(kind, asked, target):
    found = checkpoints.find(str(target))
    model = checkpoints.load(found, "sdpa")
    counts = np.arange(4096)
    config = asked(kind=kind, layers=3, draft_vocab_size=512)
    student, began = Plan.of(config, found).student(model, counts)
    assert (began["narrowed"], began["random"]) == (0, 0)
    tokens = torch.randint(4096, (2, 12))
    kept = torch.tensor([0, *range(4096 - 511, 4096)])  # the most frequent, and EOS
    torch.testing.assert_close(student.net(tokens).logits, model(tokens).logits[..., kept])
    assert frequent(counts, 3, [7], range(4096)).tolist() == [7, 4094, 4095]
    assert frequent(counts, 3, [7], range(4095)).tolist() == [7, 4093, 4094]


@pytest.mark.parametrize(("size", "wide"), [(None, 16), (20, 20)])
def test_a_heads_mlp_is_a_third_of_the_targets(asked, target, size, wide):
    found = checkpoints.find(str(target))
    plan = Plan.of(asked(kind="eagle3", intermediate_size=size), found)
    student, began = plan.student(checkpoints.load(found, "sdpa"), np.arange(4096))
    assert (plan.shape, began) == (None, {})
    assert student.tokens.tolist() == [0, *range(4096 - 63, 4096)]
    assert student.net.midlayer.mlp.up_proj.out_features == wide


def test_positions_that_the_target_has_not_are_refused(asked, target):
    with pytest.raises(OptionError, match=r"^--sequence-length 129 is beyond the target's 128 positions$"):
        Plan.of(asked(sequence_length=129), checkpoints.find(str(target)))


def test_masks_are_not_trained_under_a_window(asked, target):
    """They stand behind the text, and a window counts rows."""
    found = checkpoints.find(str(target))
    few = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 4096}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
    local = {window: replace(found, config=MistralConfig(**few, **heads, sliding_window=window)) for window in (26, 27)}
    with pytest.raises(OptionError, match="cannot be trained under a window of 26: use --kind chain"):
        Plan.of(asked(kind="parallel"), local[26])
    assert Plan.of(asked(kind="parallel"), local[27]).shape is not None
    assert Plan.of(asked(kind="chain"), local[26]).shape is not None


@pytest.mark.parametrize(
    ("draft", "options", "named"),
    [
        ({}, {"layers": 2, "num_kv_heads": 2}, "--layers 1, not 2: drop it"),
        ({"draft_tokens": [0, 5, 9]}, {}, "knows 3 tokens, not 64: drop --draft-vocab-size"),
        ({"pard_token": 9}, {}, "with mask token 9: go on with --kind parallel"),
        ({"pard_token": 9}, {"kind": "parallel"}, "with mask token 9: go on with --kind parallel"),
    ],
)
def test_a_draft_that_is_another_is_not_gone_on_with(asked, make_checkpoint, target, tmp_path, draft, options, named):
    before = edit(make_checkpoint(tmp_path / "before", num_hidden_layers=1), **draft)
    with pytest.raises(InputError, match=f"{before}.*{named}"):
        Plan.of(asked(init=str(before), **options), checkpoints.find(str(target)))


def test_a_draft_of_fewer_rows_is_not_gone_on_with(asked, make_checkpoint, tmp_path):
    before, wide = (make_checkpoint(tmp_path / str(n), num_hidden_layers=1, vocab_size=n) for n in (4096, 4100))
    with pytest.raises(CheckpointError, match=r"/4096 has 4096 tokens, not 4100: give a draft of its own$"):
        Plan.of(asked(init=str(before)), checkpoints.find(str(wide)))
    assert Plan.of(asked(init=str(wide)), checkpoints.find(str(before))).before is not None


def test_a_drafts_folder_has_the_targets_tokenizer(target, tmp_path):
    """Whatever files that is, and nothing of the model."""
    wanted = ["chat_template.jinja", "generation_config.json", "merges.txt", "spiece.model", "tokenizer.json"]
    for name in (*wanted, "config.json", "model.safetensors", "README.md"):
        (tmp_path / name).touch()
    (tmp_path / "tokenizer_old").mkdir()
    found = replace(checkpoints.find(str(target)), folder=tmp_path)
    assert [path.name for path in files_of_tokenizer(found)] == wanted
