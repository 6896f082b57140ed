"""Whole bundles on the stand-in card: built, loaded and decoded where the driver and what runs models are stand-ins."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from fake_card import BUNDLES, build_on

from specbuild.measure.exactness import plain
from specbuild.runtime import Engine, SamplingParams

DECODE = Path(__file__).resolve().parent / "support" / "card" / "decode.py"
TREES = ["off", "auto", "topk:2,2"]
WAYS = [{"batch_size": size, "resident": resident} for size in (1, 2) for resident in (False, True)]
PARAMS = [
    SamplingParams(max_new_tokens=24, seed=0),
    SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(max_new_tokens=24, temperature=1.0, top_k=40, repetition_penalty=1.1, seed=2),
    SamplingParams(max_new_tokens=24, seed=0),
]


RTX = "tensorrt-rtx"  # of no card that is lent: the soak runs it, and what takes minutes here
FAST = "onnxruntime-cuda"


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.soak] * (name != FAST)) for name in sorted(BUNDLES)]
)
def built(request, card_bundle):
    """The reference pair's bundle for a backend, with cubins for the stand-in; built and checked on it."""
    return card_bundle(request.param)


@pytest.fixture(scope="module")
def asked(bundle, prompts):
    return asked_of(bundle, prompts, 90)


def asked_of(bundle, prompts, length):
    """Prompts, how they are decoded, and the CPU bundle's tokens of plain decoding."""
    with Engine.load(bundle, batch_size=2) as engine:
        tokens = [engine.tokenizer.encode(prompt)[:length] for prompt in prompts[: len(PARAMS)]]
        expected = plain(engine, tokens, PARAMS)
    return {"prompts": tokens, "params": [asdict(each) for each in PARAMS], "expected": expected, "trees": TREES}


def decode(card, asked, **more):
    """What tests/support/card/decode.py says."""
    done = subprocess.run(
        [sys.executable, DECODE], input=json.dumps(asked | more), env=card, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout))


@pytest.mark.nightly
@pytest.mark.parametrize("ways", [WAYS[::3], pytest.param(WAYS[1:3], marks=pytest.mark.soak)], ids=["some", "others"])
def test_tokens_are_the_cpu_s(card, built, asked, ways):
    """Greedy and sampled, plain and by trees, whoever leads the rounds; and nothing is left on the device."""
    found = decode(card, asked, bundle=str(built), ways=ways)
    rounded = built.parent.name != f"card-{FAST}"  # in 16 bits
    for way, result in zip(ways, found["ways"], strict=True):
        assert [case["exact"] for case in result["cases"]] == [True] * len(TREES), (way, result["cases"])
        assert rounded or not any(case["differ"] for case in result["cases"]), (way, result["cases"])
        assert min(case["mean_acceptance_length"] for case in result["cases"][1:]) > 1.5, way
        assert result["notes"] == [], way
        if way["resident"]:
            assert result["loops"] > 1, "rounds by the root alone, and by trees"
            assert max(result["followed"]) > 3, way
        else:
            assert (result["loops"], result["followed"]) == (0, [])
    assert set(found["left"].values()) == {0}, found["left"]


@pytest.mark.nightly
def test_weights_in_blocks_decode_as_a_cpu_s(card, make_checkpoint, tmp_path, prompts):
    """The same numbers, and inputs that are not rounded; the draft is the model itself, in 4 bits."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 64, "max_position_embeddings": 192}
    model = make_checkpoint(tmp_path / "model", initializer_range=0.3, **sizes)
    options = f"--target={model}", "--max-kl=9"
    exact = "--precision=int8:weight-only", "--draft=self:int4:weight-only", "--token-embedding-type=fp32"
    build_on(card, tmp_path / "cpu.bundle", *options, *exact)
    build_on(card, tmp_path / "gpu.bundle", *options, f"--backend={FAST}", "--precision=int8", "--draft=self:int4")
    asked = asked_of(tmp_path / "cpu.bundle", prompts, 20)
    (found,) = decode(card, asked, bundle=str(tmp_path / "gpu.bundle"), ways=[{"batch_size": 1}])["ways"]
    apart = [case["divergences"] for case in found["cases"]]
    assert apart == [apart[0]] * len(TREES), "whatever is drafted"
    assert all(each["margin"] < 0.02 for each in apart[0]), "texts part where float16 hardly knows better"


@pytest.mark.nightly
@pytest.mark.soak
@pytest.mark.parametrize("built", [RTX], indirect=True)
def test_what_was_compiled_is_kept(card, built, asked, tmp_path):
    """A build leaves nothing but the bundle; its first load compiles each shape once, a second one nothing."""
    copy = Path(shutil.copytree(built, tmp_path / "copy.bundle"))
    assert not [path for path in built.parent.iterdir() if path.name.startswith(".")], "a build's cache stayed"
    cache, few = tmp_path / "copy.bundle.rtx-cache", {"trees": ["auto"], "bundle": str(copy)}
    assert not cache.exists()
    ways = [{"batch_size": 1}, {"batch_size": 1}]
    first, again = decode(card, asked, **few, ways=ways)["compilations"]
    assert (first > 0, again) == (True, 0)
    assert sorted(path.name.split("-")[0] for path in cache.iterdir()) == ["draft", "target"]
    assert decode(card, asked, **few, ways=ways[:1])["compilations"] == [0], "by another process"
    for path in cache.iterdir():
        path.write_bytes(path.read_bytes().replace(b'"90"', b'"89"'))
    assert decode(card, asked, **few, ways=ways[:1])["compilations"] == [first], "another GPU's is not taken"
