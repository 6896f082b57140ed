"""A model writes texts by its seed: sampled first, then greedy, one after another, whatever the padding."""

import torch

from specbuild.builder.distill.generate import SampledThenGreedy, go_on, sample, write


def test_a_row_is_greedy_after_its_head_and_begins_again_after_eos():
    rows = torch.tensor([[0, 0, 5, 6], [4, 9, 7, 8], [4, 5, 6, 9], [4, 5, 6, 7]])
    scores = torch.tensor([[0.0] * 10] * 4)
    scores[:, 3] = 1.0
    choice = SampledThenGreedy(torch.tensor([2, 3, 1, 1000]), torch.tensor([2, 0, 0, 0]), [9], 4)
    found = torch.stack([choice(rows, scores) for _ in range(200)])
    assert [sorted(set(row.tolist())) for row in found.T] == [[3], [*range(10)], [4], [*range(10)]]  # the third ended


def test_tokens_are_drawn_by_their_probability():
    never = -torch.inf
    scores = torch.tensor([[2.0, never, 0.0, 1.0], [never, never, never, 5.0]], dtype=torch.bfloat16)
    torch.manual_seed(0)
    drawn = torch.stack([sample(scores.repeat(1000, 1)).reshape(1000, 2) for _ in range(20)]).reshape(-1, 2)
    share = torch.bincount(drawn[:, 0], minlength=4) / len(drawn)
    torch.testing.assert_close(share, scores[0].float().softmax(-1), atol=0.01, rtol=0)
    assert (drawn[:, 1] == 3).all()


def test_a_model_writes_by_its_seed_and_padding_changes_nothing(make_model):
    """And nobody else's random numbers are drawn."""
    model, prompts = make_model(), [[3, 4, 5, 6], [7]]
    before = torch.get_rng_state()
    first, again, other = (write(model, prompts, 12, [1000] * 2, [0], 0, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert first == again != other
    greedy = write(model, prompts, 12, [0, 0], [], 0, 1)
    for text, prompt in zip(greedy, prompts, strict=True):
        assert text[: len(prompt)] == prompt
        chosen = model(torch.tensor([text])).logits[0].argmax(-1).tolist()
        assert text[len(prompt) :] == chosen[len(prompt) - 1 : -1]


def test_another_token_begins_a_text_where_the_end_is_not_the_beginning():
    """After an end of 9 comes the start, 4; where 9 is the start as well, nothing is put between two texts."""
    rows, scores = torch.tensor([[4, 5, 9], [4, 5, 6]]), torch.zeros(2, 10)
    scores[:, 7] = 1.0
    heads, begins = torch.tensor([0, 0]), torch.tensor([0, 0])
    assert SampledThenGreedy(heads, begins, [9], 4)(rows, scores).tolist() == [4, 7]
    assert SampledThenGreedy(heads, begins, [9], 9)(rows, scores).tolist() == [7, 7]
    assert SampledThenGreedy(heads, begins, [9, 4], 4)(rows, scores).tolist() == [7, 7]


def test_the_models_own_way_to_generate_is_left_out_and_left_as_it_was(make_model):
    """A checkpoint's generation_config.json may ask for less and for other tokens; a text goes on all the same."""
    model, choice = make_model(), lambda texts, scores: texts[:, -1] + 1
    own = model.generation_config
    own.eos_token_id, own.suppress_tokens, own.max_new_tokens = 12, [11], 1
    beginning = torch.tensor([[10], [20]])
    found = go_on(model, beginning, torch.ones_like(beginning), 5, choice)
    assert found.tolist() == [[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]]
    assert model.generation_config is own
