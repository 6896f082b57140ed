"""A parallel draft's masks see in training what they see in drafting, and no text uses their token."""

import pytest
import torch

from specbuild.builder.distill.parallel import Layout, mask_of, with_mask
from specbuild.builder.frontend import checkpoint as checkpoints

MASK = 97


@torch.no_grad()
def test_masks_in_training_see_what_masks_in_drafting_see(parallel):
    tokens = torch.randint(97, (2, 10))
    order = torch.randperm(10)
    layout = Layout.of(10, [order[:7].sort().values, order[:5].sort().values, order[:2].sort().values])
    logits = parallel.logits(tokens, layout)
    masks = [(row, int(a), int(d)) for row, (a, d) in enumerate(zip(layout.anchors, layout.depths, strict=True)) if d]
    assert len(masks) >= 8
    for row, anchor, depth in masks:
        ids = torch.cat([tokens[:, : anchor + 1], torch.full((2, depth), MASK)], 1)
        torch.testing.assert_close(logits[:, row], parallel.net(input_ids=ids).logits[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("rows", "mask"), [(4096, 4096), (4100, 4099)])
def test_the_mask_is_a_row_that_no_text_uses(make_checkpoint, tmp_path, rows, mask):
    """The tokenizer has 4096 tokens: a target with rows to spare gives its last, another is given one more."""
    target = checkpoints.find(str(make_checkpoint(tmp_path / "target", vocab_size=rows, num_hidden_layers=1)))
    assert mask_of(target) == mask


@pytest.mark.parametrize("mask", [96, MASK])
def test_a_mask_begins_as_the_mean_of_the_others(make_model, mask):
    net = make_model(num_hidden_layers=1)
    before = net.get_input_embeddings().weight.detach().clone()
    with_mask(net, mask)
    rows = net.get_input_embeddings().weight
    assert (len(rows), net.config.vocab_size) == (max(97, mask + 1),) * 2
    assert torch.equal(rows[:mask], before[:mask])
    torch.testing.assert_close(rows[mask], before[:mask].mean(0))
