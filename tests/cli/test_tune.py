"""`specbuild tune`: what it prints, and what follows from it."""

import json
import shutil

import pytest

GENERATE = ("generate", "-p", "import os", "-n", 16)


@pytest.mark.slow
def test_what_was_found_is_shown(specbuild, bundle, bundle_copy, tiny_bundle, tmp_path):
    """A row for each tree of a draft model; without one there is none."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "import os\\n"}\n{"prompt": "x = ", "temperature": 1.0}\n')
    outcome = specbuild("tune", bundle_copy, "--prompts", prompts, "--num-prompts", 1, "-n", 8, "-b", 1)
    assert (outcome.status, outcome.err) == (0, "")
    assert [line.split()[0] for line in outcome.out.splitlines()[1:7]] == [f"best:{n}" for n in (1, 2, 4, 8, 16, 32)]
    for shown in ("measured", "auto ", "of the draft model", "calibration error"):
        assert shown in outcome.out
    tuned, plain = (specbuild(*GENERATE, each, "--json") for each in (bundle_copy, bundle))
    after, before = (json.loads(each.out) for each in (tuned, plain))
    assert (after["metrics"]["speculation"], tuned.err) == ("auto", "")
    assert after["token_ids"] == before["token_ids"]
    assert "was tuned with another thread count (" in specbuild(*GENERATE, bundle_copy, "-t", 3).err
    alone = shutil.copytree(tiny_bundle, tmp_path / "alone")
    report = json.loads(specbuild("tune", alone, "-n", 8, "--num-prompts", 1, "--json").out)
    assert (report["trees"], report["prompts"], report["new_tokens"]) == ([], 1, 8)
