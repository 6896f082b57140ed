"""Fixtures of the benchmark's tests: results of made-up turns, whose sums are known."""

import json
from dataclasses import replace

import pytest

from specbuild.measure.bench.measure import Sample, Turn
from specbuild.measure.bench.result import build
from specbuild.runtime import Bundle, RunStats, SpeculationStats
from specbuild.runtime.bundle.manifest import FileRecord

STEPS = {"verify": [[1, 0.5], [64, 2.0]], "draft": [[1, 0.1], [64, 0.2]]}


def sample(category, tokens, ttft, later, accepted=None):
    drafting = SpeculationStats()
    if accepted is not None:
        drafting.record(4, accepted, 4)
    gaps = [later / (tokens - 1)] * (tokens - 1) if tokens > 1 else []
    return Sample(category, list(range(tokens)), ttft, ttft + later, gaps, drafting)


@pytest.fixture
def result(bundle):
    """Two prompts, plainly and by chain:4, whose second text is a single token."""
    stats = RunStats(rounds=4, emitted=6, total=1.0, draft=0.1, verify=0.5, accept=0.06, commit=0.04)
    single = sample("qa", 1, 1.0, 0.0)
    plain = [Turn([sample("math", 3, 1.0, 4.0)], 5.0, stats), Turn([single], 1.0, stats)]
    last = RunStats(rounds=1, emitted=1, total=0.25)
    drafted = [Turn([sample("math", 3, 1.0, 1.0, 3)], 2.0, stats), Turn([single], 1.0, last)]
    return build(Bundle.open(bundle), "specbuild bench", {"seed": 0}, {1: {"off": plain, "chain:4": drafted}})


@pytest.fixture
def untuned_and_tuned(bundle, tmp_path):
    """The same turns of three contenders, of a bundle as it was built and of one that has a timing table."""
    opened, turns = Bundle.open(bundle), [Turn([sample("qa", 2, 1.0, 1.0, 3)], 2.0, RunStats(1, 2, 1.0))]
    measured = {1: {"off": turns, "chain:4": turns, "auto": turns}}
    files = opened.manifest.files | {"timings.json": FileRecord(0, "")}
    (tmp_path / "manifest.json").write_bytes((bundle / "manifest.json").read_bytes())
    (tmp_path / "timings.json").write_text(json.dumps({"times": {"1": STEPS, "2": STEPS}}))
    tuned = Bundle(tmp_path, replace(opened.manifest, files=files))
    ours, theirs = (build(each, "specbuild bench", {"seed": 0}, measured) for each in (opened, tuned))
    return ours, theirs
