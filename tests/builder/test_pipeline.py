"""Whole builds: random pairs of every shape decode as transformers does, and a build that stops leaves nothing."""

import errno
import json
import shutil

import pytest
import torch
from data_files import snapshot
from small_models import LLAMA3

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.pipeline import build, stages
from specbuild.runtime import Bundle, Engine, SamplingParams
from specbuild.runtime.errors import OutputError

NEW_TOKENS = 20
PROMPTS = [[17], [5, 900, 31, 31, 2048, 7], list(range(100, 140))]
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
ODD = {
    **{"hidden_size": 39, "intermediate_size": 53, "num_attention_heads": 3, "num_key_value_heads": 3},
    **{"head_dim": 48, "max_position_embeddings": 77},
}
ONE = {"num_hidden_layers": 1}
PAIRS = {
    "gqa, untied, biases, padded; mqa, tied, padded further": (
        {"attention_bias": True, "mlp_bias": True, "vocab_size": 4128},
        ONE | {"num_key_value_heads": 1, "tie_word_embeddings": True, "vocab_size": 4200},
    ),
    "mha, tied, llama3, shards, padded; linear": (
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_parameters": LLAMA3}
        | {"max_shard_size": "200KB", "vocab_size": 4160},
        ONE | {"rope_parameters": LINEAR},
    ),
    "odd, linear; odd, biases": (ODD | {"rope_parameters": LINEAR}, ODD | ONE | {"attention_bias": True}),
    "mqa; no draft": ({"num_key_value_heads": 1}, None),
}


def greedy(folder):
    """What `transformers` makes of the prompts, in float32, where it chooses no row that no token has."""
    from transformers import AutoModelForCausalLM

    model, outputs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), []
    options = {"max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    options["suppress_tokens"] = list(range(4096, model.config.vocab_size)) or None
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.soak(only=("mha, tied, llama3, shards, padded; linear", "odd, linear; odd, biases"))
@pytest.mark.nightly
@pytest.mark.parametrize("name", PAIRS)
def test_a_random_pair_decodes_as_transformers_does(make_sharp_checkpoint, tmp_path, name):
    target_fields, draft_fields = PAIRS[name]
    target = make_sharp_checkpoint(tmp_path / "target", **target_fields)
    draft = make_sharp_checkpoint(tmp_path / "draft", **draft_fields) if draft_fields else None
    output = tmp_path / "bundle"
    build(BuildConfig(str(target), output, draft=str(draft) if draft else None, max_batch_size=2))
    expected = greedy(target)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    for drafter in ("model", "ngram", None) if draft else ("ngram", None):
        with Engine.load(output, drafter=drafter, batch_size=2, threads=1) as engine:
            sampled = None
            for tree in ("off", "chain:4", "topk:2,3", "best:16"):
                params = SamplingParams(max_new_tokens=NEW_TOKENS, speculation=tree)
                assert [result.token_ids for result in engine.generate(PROMPTS, params)] == expected, (drafter, tree)
                params = SamplingParams(max_new_tokens=NEW_TOKENS, speculation=tree, temperature=1, seed=3)
                tokens = [result.token_ids for result in engine.generate(PROMPTS, params)]
                sampled = sampled or tokens
                assert tokens == sampled, (drafter, tree)


def test_the_report_says_how_exact(bundle):
    report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    assert report["exactness"]["largest_logit_difference"] < 1e-4
    assert len(report["exactness"]["cases"]) >= 3
    assert all(case["exact"] for case in report["exactness"]["cases"])
    assert {"StaticReshape": 24, "FuseQKV": 6}.items() <= report["matched_passes"]["target"].items()
    stages = report["operators"]["target"]
    assert stages["exported"]["TreeAttention"] == stages["lowered"]["TreeAttention"] == 6


@pytest.fixture(scope="module")
def tiny(make_checkpoint, tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", **ONE))


@pytest.fixture(scope="module")
def tiny_bundle(tiny, tmp_path_factory):
    """A small bundle, the stages its build announced, and how many it had said there would be."""
    config = BuildConfig(tiny, tmp_path_factory.mktemp("bundles") / "tiny.bundle", max_batch_size=1, max_seq_len=40)
    announced = []
    build(config, announced.append)
    return config.output, announced, stages(config)


@pytest.fixture
def place(tiny_bundle, tmp_path):
    """A folder with an older bundle `b` and nothing else."""
    folder = tmp_path / "place"
    folder.mkdir()
    shutil.copytree(tiny_bundle[0], folder / "b")
    return folder


@pytest.mark.slow
def test_stages_are_as_many_as_announced(tiny_bundle):
    path, announced, expected = tiny_bundle
    assert len(announced) == len(set(announced)) == expected
    assert announced[-1] == "check"
    manifest = Bundle.open(path).manifest
    assert (manifest.max_seq_len, manifest.models["target"].capacity) == (40, 104)


class Interrupted(BaseException):
    """Like KeyboardInterrupt, no Exception."""


@pytest.mark.slow
@pytest.mark.nightly(only=("check-error3",))
@pytest.mark.usefixtures("quick_export")
@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("checkpoints", Interrupted()),
        ("target: load", OSError(errno.ENOSPC, "No space left on device")),
        ("target: export", RuntimeError("any")),
        ("check", Interrupted()),
    ],
)
def test_a_build_that_stops_leaves_nothing(tiny, place, stage, error):
    before = snapshot(place)

    def progress(name):
        if name == stage:
            raise error

    with pytest.raises((type(error), OutputError)):
        build(BuildConfig(tiny, place / "b", force=True, max_batch_size=1), progress)
    assert snapshot(place) == before
    assert [path.name for path in place.iterdir()] == ["b"]


def test_folders_made_for_a_build_that_stops_go(tiny, tmp_path):
    def progress(name):
        if name == "target: load":
            assert (tmp_path / "a" / "b").is_dir()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        build(BuildConfig(tiny, tmp_path / "a" / "b" / "bundle"), progress)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_export")
def test_force_replaces(tiny, place):
    (place / "b" / "stray").write_text("of the older bundle")
    build(BuildConfig(tiny, place / "b", force=True, max_batch_size=1, max_seq_len=50))
    assert Bundle.open(place / "b").manifest.max_seq_len == 50
    assert not (place / "b" / "stray").exists()
    assert [path.name for path in place.iterdir()] == ["b"]
