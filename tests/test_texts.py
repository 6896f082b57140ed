"""One text as a string: speculation on or off, streamed or whole, stopped or not, by tokenizers of every kind."""

import dataclasses
import random

import pytest
from campaign.bundle_copy import copied, manifest, put
from other_tokenizers import give
from text_tokenizers import END, KINDS, SAID, SIZE, byte_level

from specbuild.runtime import Engine, SamplingParams

TREES = ("auto", "chain:4", "topk:2,3", "best:8")
SHAPE = {"vocab_size": SIZE, "num_hidden_layers": 1, "initializer_range": 0.2}
SPOKEN = ("byte_level", "added", "byte_fallback", "prefix_space")  # whose tokens llguidance can read
CHOICES = ("\n🦊", "猫🦊", "🦊\n")  # 🦊 is no token's: it is cut after three


@pytest.fixture(scope="session")
def random_bundle(once, make_checkpoint, build_shared):
    """A random model and a draft that is nearly the same; each of its tokens is about as likely as another."""

    def make(path):
        import torch
        from safetensors.torch import load_file, save_file

        target, draft = (
            give(make_checkpoint(path.with_name(f"{path.name}-{name}"), **SHAPE), byte_level(), END)
            for name in ("target", "draft")
        )
        weights = load_file(draft / "model.safetensors")
        torch.manual_seed(1)
        near = {name: each + 0.01 * torch.randn_like(each) for name, each in weights.items()}
        save_file(near, draft / "model.safetensors", {"format": "pt"})
        models = {"target": str(target), "draft": str(draft)}
        build_shared(**models, output=path, max_seq_len=96, max_batch_size=4, buckets=(1, 2, 4, 8, 16), tune=False)

    return once("random.bundle", make)


def asked(kind, number):
    """A prompt and how it is continued."""
    rng = random.Random(f"{kind}:{number}")
    how = {"temperature": rng.choice((0.0, 0.8)), "skip_special_tokens": rng.random() < 0.5}
    if kind in SPOKEN and rng.random() < 0.3:
        how |= {"max_new_tokens": 3, "structured_outputs": {"choice": [rng.choice(CHOICES)]}}
    else:
        how |= {"max_new_tokens": rng.randrange(1, 33), "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.5:
        how["stop"] = ["".join(rng.choices(SAID, k=rng.choice((1, 1, 2)))) for _ in range(2)]
    prompt = [rng.randrange(SIZE) for _ in range(rng.randrange(1, 9))]
    return prompt, SamplingParams(seed=number, speculation="off", **how)


def texts(engine, prompts, params):
    """The texts as results have them, and put together from what is streamed."""
    streamed = [""] * len(prompts)
    for chunk in engine.stream(prompts, params):
        streamed[chunk.index] += chunk.text
    return [result.text for result in engine.generate(prompts, params)], streamed


@pytest.mark.slow(but=("added-8",))
@pytest.mark.parametrize("count", [8, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_differs(random_bundle, kind, count, tmp_path):
    root = copied(random_bundle, tmp_path)
    put(root, manifest(root)["tokenizer"], KINDS[kind]().to_str().encode(), hashed=True)
    prompts, plain = map(list, zip(*(asked(kind, number) for number in range(count)), strict=True))
    rng = random.Random(count)
    with Engine.load(root, batch_size=4) as engine:
        expected, streamed = texts(engine, prompts, plain)
        assert streamed == expected
        drafted = [dataclasses.replace(each, speculation=rng.choice(TREES)) for each in plain]
        for found in texts(engine, prompts, drafted):
            assert [at for at in range(count) if found[at] != expected[at]] == []
        unstopped = [dataclasses.replace(each, stop=()) for each in plain]
        whole, _ = texts(engine, prompts, unstopped)
    assert all(text.startswith(each) for text, each in zip(whole, expected, strict=True))
    assert len(set(expected)) > count / 3


@pytest.mark.parametrize(("speculation", "stop"), [("off", ()), ("auto", ("zz",)), ("chain:4", ("🦊",))])
def test_what_a_cut_character_leaves_behind(random_bundle, speculation, stop, tmp_path):
    """Half a character is one U+FFFD, and what is before it stays: by Unicode, not by the library's byte fallback."""
    root = copied(random_bundle, tmp_path)
    put(root, manifest(root)["tokenizer"], KINDS["byte_fallback"]().to_str().encode(), hashed=True)
    how = {"max_new_tokens": 3, "structured_outputs": {"choice": ["\n🦊"]}}
    with Engine.load(root) as engine:
        (result,) = engine.generate("a", SamplingParams(speculation=speculation, stop=stop, **how))
    assert (result.text, result.finish_reason, len(result.token_ids)) == ("\n\ufffd", "length", 3)
