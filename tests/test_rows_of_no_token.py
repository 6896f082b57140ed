"""Rows of a target's vocabulary that no token has are never chosen, drafted or listed, wherever they lie."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import pytest
from fake_card import CARD, COMMAND, SMALL
from other_tokenizers import edit

from specbuild import Engine, OptionError, PromptError, SamplingParams

pytestmark = pytest.mark.slow

ROWS, HOLES = 4224, 300
SIZES = {"vocab_size": ROWS, "num_hidden_layers": 1, "max_position_embeddings": 192}
TREES = ("off", "chain:4", "topk:2,3", "best:7")
WAYS = [{"batch_size": 2, "resident": resident} for resident in (False, True)]
PROMPTS = [[5, 17], [300, 301, 302], [9], [4000, 12, 77, 4]]


@dataclass(frozen=True)
class Padded:
    """A bundle for a CPU, the ids of its tokens, and the folder of its checkpoints."""

    engine: Engine
    known: set[int]
    folder: Path


def dig(folder):
    """Take tokens out of a tokenizer that no other is merged from; the ids of the others stay."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    parts = {part for merge in merges for part in merge}
    spare = [merge for merge in merges if "".join(merge) not in parts][::2][:HOLES]
    for merge in spare:
        merges.remove(merge)
        del vocabulary["".join(merge)]
    assert len(spare) == HOLES
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def tokens_of(folder):
    """The ids that tokens have."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return {*content["model"]["vocab"].values(), *(added["id"] for added in content["added_tokens"])}


@pytest.fixture(
    scope="module",
    params=[pytest.param("past the last token", marks=pytest.mark.nightly), "between tokens and past the last"],
)
def padded(request, make_checkpoint, build_shared, tmp_path_factory):
    """A random model with more rows than tokens, and a draft that is nearly the same."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("padded")
    models = {name: str(folder / name) for name in ("target", "draft")}
    for path in map(Path, models.values()):
        make_checkpoint(path, initializer_range=0.2, **SIZES)
        if request.param.startswith("between"):
            dig(edit(path, bos_token_id=None))
    weights = load_file(folder / "draft" / "model.safetensors")
    near = {name: each + 0.01 * torch.randn_like(each) for name, each in weights.items()}
    save_file(near, folder / "draft" / "model.safetensors", {"format": "pt"})
    build_shared(**models, output=folder / "b", max_seq_len=128, max_batch_size=4, buckets=(1, 2, 4, 8), tune=False)
    with Engine.load(folder / "b", drafter="model") as engine:
        yield Padded(engine, tokens_of(folder / "target"), folder)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_they_are_never_chosen(padded, temperature):
    engine, known = padded.engine, padded.known
    params = SamplingParams(48, temperature=temperature, seed=1, ignore_eos=True, n=2)
    plain = []
    for tree in TREES:
        found = [result.token_ids for result in engine.generate(PROMPTS, replace(params, speculation=tree))]
        plain = plain or found
        assert {*chain(*found)} <= known
        assert found == plain
    assert len({*chain(*plain)}) > 90


def test_the_draft_draws_as_the_target_does(padded):
    engine = padded.engine
    params = SamplingParams(48, temperature=100.0, seed=1, ignore_eos=True, speculation="chain:4")
    for result in engine.generate(PROMPTS, params):
        assert result.metrics.speculative_decoding.mean_acceptance_length > 4.5


def test_they_are_not_among_the_likeliest(padded):
    engine, known = padded.engine, padded.known
    params = SamplingParams(32, temperature=1.0, seed=1, logprobs=20, ignore_eos=True)
    (result,) = engine.generate([[5, 17]], params)
    assert result.logprobs
    listed = {token for each in result.logprobs for token, _ in each.top}
    assert len(listed) > 20
    assert listed <= known


def test_a_bias_or_a_prompt_that_names_one_is_refused(padded):
    engine, known = padded.engine, padded.known
    for token in sorted({*range(ROWS)} - known)[:: HOLES // 10]:
        with pytest.raises(
            OptionError, match=r"logit_bias names .* past the vocabulary|logit_bias names \d+, which no"
        ):
            engine.generate([[5]], SamplingParams(4, logit_bias={token: 1e6}))
    with pytest.raises(PromptError, match="outside the vocabulary"):
        engine.generate([[ROWS - 1]], SamplingParams(4))


@pytest.mark.nightly
def test_nor_on_a_card(padded, card, tmp_path):
    """A device chooses what a CPU does, and that is a token."""
    sources = [f"--{name}={padded.folder / name}" for name in ("target", "draft")]
    build = [*sources, "--backend=onnxruntime-cuda", "--precision=fp32", *SMALL, f"--output={tmp_path / 'b'}"]
    done = subprocess.run([sys.executable, "-c", COMMAND, "build", *build], env=card, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    params = [SamplingParams(48, temperature=t, seed=1, ignore_eos=True, speculation="off") for t in (0.0, 1.0, 100.0)]
    prompts = PROMPTS[: len(params)]
    expected = [result.token_ids for result in padded.engine.generate(prompts, params)]
    assert {*chain(*expected)} <= padded.known
    asked = {"bundle": str(tmp_path / "b"), "prompts": prompts, "params": [asdict(each) for each in params]}
    asked |= {"expected": expected, "trees": ["off", "chain:4", "topk:2,2"], "ways": WAYS}
    command = [sys.executable, CARD / "decode.py"]
    done = subprocess.run(command, input=json.dumps(asked), env=card, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for way in json.loads(done.stdout)["ways"]:
        assert [case["differ"] for case in way["cases"]] == [0] * 3
