"""An ordinary draft has the loss, the head on disk, and the texts of its own that its training needs."""

import torch
from transformers import AutoModelForCausalLM

from specbuild.builder.distill.chain import trim


def test_a_trimmed_head_is_whole_on_disk(chain, tmp_path):
    chain.save(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.draft_tokens == list(range(0, 97, 2))
    tokens = torch.randint(97, (1, 8))
    logits = again(tokens).logits
    torch.testing.assert_close(logits[..., ::2], chain.net(tokens).logits)
    assert not logits[..., 1::2].any()


def test_a_draft_writes_only_what_its_head_knows(chain):
    beginning = torch.randint(97, (3, 4))
    texts = list[torch.Tensor]()
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(chain.write(beginning, 12))
    assert texts[0].shape == (3, 12)
    assert torch.equal(texts[0][:, :4], beginning)
    assert not (texts[0][:, 4:] % 2).any()
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_a_tied_head_is_trimmed_and_the_embedding_is_not(make_model):
    net, tokens, text = make_model(tie_word_embeddings=True), torch.arange(0, 97, 3), torch.randint(97, (1, 8))
    before = net(text).logits
    torch.testing.assert_close(trim(net, tokens)(text).logits, before[..., tokens])
    torch.testing.assert_close(net(text).logits, before)
