"""Rotary embeddings become tables of positions, and rotations one operator, where they are that."""

import contextlib
import sys

import pytest
import torch
from small_models import random_model
from torch import nn

from specbuild.builder.frontend.portable_rotary import RotaryTable, check, swap
from specbuild.runtime.errors import CheckpointError

POSITIONS, ROWS = 20, 26
AT = torch.tensor([[0, 3, 4, 19], [7, 7, 8, 1]])


class Longer(nn.Module):
    """Positions of another scale in texts of more than `fits` tokens."""

    def __init__(self, fits):
        super().__init__()
        self.fits = fits

    def forward(self, _, position_ids):
        scale = 1.0 if int(position_ids.max()) < self.fits else 0.5
        angles = scale * position_ids[..., None] * torch.ones(8)
        return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("model_type", "fields", "swapped"),
    [
        ("llama", {}, True),
        ("gemma3_text", {"head_dim": 16}, True),
        ("gpt_neox", {"rotary_pct": 0.5}, True),  # rotates a part of each head
        ("cohere", {}, False),  # rotates pairs
        ("gpt2", {}, False),  # rotates nothing
    ],
)
@torch.no_grad()
def test_a_model_computes_the_same_by_tables_and_is_as_it_was_afterwards(model_type, fields, swapped):
    model = random_model(model_type, **fields)
    modeling = sys.modules[type(model).__module__]
    rotation, names = getattr(modeling, "apply_rotary_pos_emb", None), [name for name, _ in model.named_modules()]
    kinds, logits = [type(module) for module in model.modules()], model(input_ids=AT).logits
    with contextlib.ExitStack() as undo:
        swap(model, POSITIONS, ROWS, undo)
        torch.testing.assert_close(model(input_ids=AT).logits, logits, rtol=1e-4, atol=1e-4)
        tables = [module for module in model.modules() if isinstance(module, RotaryTable)]
        assert len(tables) == int(model_type != "gpt2")
        assert (getattr(modeling, "apply_rotary_pos_emb", None) is not rotation) == swapped
        for table in tables:
            for buffer in table.buffers():
                buffer.zero_()
            assert not torch.allclose(model(input_ids=AT).logits, logits, atol=1e-2)
    assert getattr(modeling, "apply_rotary_pos_emb", None) is rotation
    assert [type(module) for module in model.modules()] == kinds
    assert [name for name, _ in model.named_modules()] == names
    torch.testing.assert_close(model(input_ids=AT).logits, logits, rtol=0, atol=0)


@pytest.mark.parametrize("fits", [4, 16, 63])
def test_positions_that_depend_on_the_length_are_refused_with_the_length_that_fits(fits):
    with pytest.raises(CheckpointError, match=f"past {fits} tokens.*--max-seq-len {fits}$"):
        RotaryTable(Longer(fits), 64, 64, halves=False)
    assert RotaryTable(Longer(fits), fits, 64, halves=False).get_buffer("cos_None").shape == (64, 8)


def test_a_model_on_the_meta_device_is_checked_before_it_has_weights():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    with torch.device("meta"):
        model = random_model("llama", rope_parameters=rope, max_position_embeddings=32)
    check(model, 32)
    cos, _ = model.model.rotary_emb(torch.zeros(1, device="meta"), torch.zeros(2, 3, device="meta"))
    assert (cos.shape, cos.device.type) == ((2, 3, 16), "meta")
    with pytest.raises(CheckpointError, match="--max-seq-len 32"):
        check(model, 64)


class OtherRotaryEmbedding(nn.Module):
    """One that is made of other things than a configuration, and is no pair."""

    def __init__(self, size, base):
        super().__init__()
        self.size, self.base = size, base

    def forward(self, _, position_ids):
        return (position_ids[..., None] * torch.ones(self.size) / self.base,) * 3


def test_an_embedding_that_is_no_pair_is_refused_when_it_is_exported():
    model = random_model("llama", num_hidden_layers=1)
    model.model.rotary_emb = OtherRotaryEmbedding(2, 8)
    check(model, 8)  # it cannot be made without weights
    with pytest.raises(CheckpointError, match="no pair of cosines and sines"):
        RotaryTable(model.model.rotary_emb, 8, 8, halves=True)
