"""The reference decodes greedily and without what generation_config.json asks, and gives a text's logits."""

import pytest

from specbuild.builder.frontend.reference import Reference, greedy, text_logits, without_defaults

PROMPTS = [[5, 17, 3, 88, 42], [61]]


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


def most_likely(model, prompt, count):
    """Token by token, without a cache."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(text_logits(model, text)[-1].argmax()))
    return text[len(prompt) :]


def test_each_prompt_goes_on_with_the_most_likely_tokens(model):
    found = greedy(model, PROMPTS, 8, [])
    assert found == [Reference(prompt, most_likely(model, prompt, 8)) for prompt in PROMPTS]
    for each in found:
        assert text_logits(model, each.text).argmax(1)[-8:].tolist() == each.tokens


def test_a_continuation_ends_with_the_first_token_that_ends_texts(model):
    tokens = most_likely(model, PROMPTS[0], 8)
    eos = [96, tokens[3]]
    (found,) = greedy(model, PROMPTS[:1], 8, eos)
    assert found.tokens == tokens[: tokens.index(tokens[3]) + 1]


@pytest.mark.parametrize(
    "asked",
    [
        {"do_sample": True, "temperature": 9.0},
        {"max_length": 6},
        {"suppress_tokens": list(range(90))},
        {"eos_token_id": list(range(97))},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_generation_config_json_asks_for_is_not_done(model, asked, monkeypatch):
    expected = most_likely(model, PROMPTS[0], 8)
    for name, value in asked.items():
        monkeypatch.setattr(model.generation_config, name, value)
    assert greedy(model, PROMPTS[:1], 8, [])[0].tokens == expected


def test_a_models_own_settings_are_back_afterwards(model):
    own = model.generation_config
    with without_defaults(model):
        assert model.generation_config is not own
        assert model.generation_config.to_diff_dict().keys() <= {"transformers_version"}
    assert model.generation_config is own
    with pytest.raises(ZeroDivisionError), without_defaults(model):
        _ = 1 / 0
    assert model.generation_config is own
