"""What is seen of an engine while it runs, and the limits that may change meanwhile."""

import itertools
from dataclasses import replace

import pytest

from specbuild.runtime import Engine, Limits, SamplingParams
from specbuild.runtime.errors import OptionError


@pytest.mark.slow
def test_limits_change_while_it_runs_and_no_token_does(bundle, prompts):
    """From another thread, between any two rounds; trees that were asked for shrink, and are not refused."""
    asked = SamplingParams(48, speculation="best:8", ignore_eos=True)
    changing = itertools.cycle([Limits(), Limits(0), Limits(5), Limits(None, 1.0, {"1-2": 3, "3-9": 0})])
    with Engine.load(bundle) as engine:
        (expected,) = engine.generate(prompts[0], replace(asked, speculation="off"))
        found = list[int]()
        for chunk in engine.stream(prompts[0], asked):
            engine.limits = next(changing)
            found += chunk.token_ids
        engine.limits = Limits(0)
        assert engine.limits == Limits(0)
        (none,) = engine.generate(prompts[0], asked)
        for bad, words in ((3, "must be Limits"), (Limits(min_expected_speedup=2.0), "needs a tuned bundle")):
            with pytest.raises(OptionError, match=words):
                engine.limits = bad
    assert found == none.token_ids == expected.token_ids
    assert none.metrics
    assert none.metrics.speculative_decoding.num_draft_tokens == 0


def test_what_it_tells_while_nothing_runs(bundle):
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
