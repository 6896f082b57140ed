"""`specbuild verify`: equal tokens are status 0, a real divergence is status 1 and shown."""

import json

import pytest


@pytest.fixture
def file(tmp_path, prompts):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts[3:6]), encoding="utf-8")
    return path


@pytest.mark.slow
def test_an_exact_bundle(specbuild, bundle, pair, file):
    outcome = specbuild("verify", bundle, "--hf", pair / "target", "--prompts", file, "-n", 12, "-b", 2, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    cases = [json.loads(line) for line in outcome.out.splitlines()]
    names = [case["name"] for case in cases]
    assert len(set(names)) == len(names)
    assert sum("Hugging Face" in name for name in names) == 1
    for drafter in ("model", "ngram"):
        for tree in ("auto", "chain:4", "topk:2,3", "topk:4,4", "best:16"):
            assert sum(drafter in name and tree in name for name in names) >= 2  # greedy and sampled
    assert all(case["exact"] and case["prompts"] == 3 and case["tokens"] > 0 for case in cases)
    assert max(case["mean_acceptance_length"] for case in cases if "model" in case["name"]) > 1.5


@pytest.mark.slow
def test_another_model_is_a_real_divergence(specbuild, bundle, tiny, file):
    outcome = specbuild("verify", bundle, "--hf", tiny, "--prompts", file, "-n", 4)
    assert (outcome.status, outcome.err) == (1, "")
    assert outcome.out.count("DIFFERENT") == 1
    (line, *_) = (line for line in outcome.out.splitlines() if "margin" in line)
    assert "prompt 1, token 0" in line
    assert "real" in line
