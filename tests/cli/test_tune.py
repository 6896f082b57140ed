"""`specbuild tune`: what it prints, and what follows from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import Specbuild


@pytest.mark.slow
def test_what_was_found_is_shown(specbuild: Specbuild, bundle_copy: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    """A row for each tree of a draft model; without one there is none."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "import os\\n"}\n{"prompt": "x = ", "temperature": 1.0}\n')
    outcome = specbuild("tune", bundle_copy, "--prompts", prompts, "--num-prompts", 1, "-n", 8, "-b", 1)
    assert (outcome.status, outcome.err) == (0, "")
    assert [line.split()[0] for line in outcome.out.splitlines()[1:7]] == [f"best:{n}" for n in (1, 2, 4, 8, 16, 32)]
    for shown in ("measured", "auto ", "of the draft model", "calibration error"):
        assert shown in outcome.out
    alone = shutil.copytree(tiny_bundle, tmp_path / "alone")
    assert "there is no draft, lookup alone is tuned" in specbuild("tune", alone, "-n", 8, "--num-prompts", 1).out


@pytest.mark.nightly
def test_what_follows_from_it(specbuild: Specbuild, bundle_copy: Path) -> None:
    report = json.loads(specbuild("tune", bundle_copy, "-n", 8, "-b", 1, "--json").out)
    assert (report["prompts"], report["new_tokens"]) == (6, 8)
    answer = specbuild("generate", bundle_copy, "-p", "import os", "-n", 8, "--json")
    assert (json.loads(answer.out)["metrics"]["speculation"], answer.err) == ("auto", "")
    assert specbuild("verify", bundle_copy, "-n", 8).status == 0
    assert "of the draft model" in specbuild("inspect", bundle_copy).out
    told = specbuild("bench", bundle_copy, "-t", 3, "--concurrency", "1,2", "--num-prompts", 2, "-n", 4)
    (line,) = [line for line in told.err.splitlines() if "tuned" in line]
    assert line.startswith(f"specbuild: {bundle_copy} was tuned with another thread count (")
    assert told.status == 0
    (bundle_copy / "timings.json").write_text("{}")
    assert "is not what was built" in specbuild("generate", bundle_copy, "-p", "x").refusal()
