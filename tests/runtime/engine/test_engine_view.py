"""What is seen of an engine while it runs, and the limits that may change meanwhile."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime import Engine, Limits, SamplingParams
from specbuild.runtime.errors import OptionError


@pytest.mark.slow
def test_limits_change_while_it_runs_and_no_token_does(bundle: Path, prompts: list[str]) -> None:
    """From another thread, between any two rounds; trees that were asked for shrink, and are not refused."""
    asked = [SamplingParams(48, 0.8 * (i % 2), seed=i, speculation=("auto", "best:8")[i % 2]) for i in range(4)]
    changing = itertools.cycle([Limits(), Limits(0), Limits(5), Limits(1), Limits(None, 1.0, {"1-2": 3, "3-9": 0})])
    with Engine.load(bundle, batch_size=4) as engine:
        expected = engine.generate(prompts[:4], [replace(each, speculation="off") for each in asked])
        found = dict[int, Any]()
        for chunk in engine.stream(prompts[:4], asked):
            engine.limits = next(changing)
            found[chunk.index] = chunk.result
        engine.limits = Limits(0)
        assert engine.limits == Limits(0)
        none = engine.generate(prompts[:4], asked)
        for bad, words in ((3, "must be Limits"), (Limits(min_expected_speedup=2.0), "needs a tuned bundle")):
            with pytest.raises(OptionError, match=words):
                engine.limits = bad  # type: ignore[assignment]
    for results, drafts in (([found[i] for i in range(4)], True), (none, False)):
        assert [r.token_ids for r in results] == [r.token_ids for r in expected]
        assert any(r.metrics.speculative_decoding.num_draft_tokens for r in results) == drafts


def test_what_it_tells_while_nothing_runs(bundle: Path) -> None:
    with Engine.load(bundle, batch_size=2) as engine:
        assert (engine.max_model_len, engine.notes, engine.correction) == (engine.manifest.max_seq_len, [], 1.0)
        usage = engine.usage
        assert (usage.running, usage.waiting, usage.slots) == (0, 0, 2)
        assert engine.health().state == "idle"
        assert engine.cache_bytes > 0
        before = engine.stats
        (result,) = engine.generate([5, 6, 7], SamplingParams(max_new_tokens=4, cache_salt="a"))
        assert engine.stats.rounds > before.rounds == 0
        salt, text = engine.cached_texts[0]
        assert (salt, text[:3]) == ("a", [5, 6, 7])
        assert result.token_ids
