"""Statistics by hand: percentiles, paired intervals that cover, and acceptance by depth."""

import numpy as np
import pytest

from specbuild.measure.bench.statistics import acceptance, latency, speedup
from specbuild.runtime import SpeculationStats


def recorded(*rounds):
    stats = SpeculationStats()
    for each in rounds:
        stats.record(*each)
    return stats


def test_latencies_are_vllm_s_in_milliseconds():
    found = latency("ttft", [i / 1000 for i in range(101)])
    assert found == pytest.approx({"mean_ttft_ms": 50, "p50_ttft_ms": 50, "p95_ttft_ms": 95, "p99_ttft_ms": 99})
    assert set(latency("itl", []).values()) == {None}


def test_a_speedup_is_of_seconds_a_token():
    assert speedup([(2.0, 10), (6.0, 10)], [(1.0, 10), (1.0, 5)], 0)["value"] == pytest.approx(3.0)


def test_pairs_stay_together():
    slow = [(float(10**i), 10) for i in range(4)]  # prompts that differ a thousandfold, the ratio never
    found = speedup(slow, [(seconds / 2, tokens) for seconds, tokens in slow], 0)
    assert list(found.values()) == pytest.approx([2.0, 2.0, 2.0])


def test_what_has_no_token_to_time_is_left_out():
    for nothing, something in (((0.0, 0), (0.0, 0)), ((0.5, 0), (1.0, 4)), ((1.0, 4), (0.5, 0))):
        found = speedup([nothing, (3.0, 3)], [something, (1.0, 3)], 0)
        assert found == {"value": pytest.approx(3.0), "low": None, "high": None}
    assert speedup([(0.0, 0)], [(0.0, 0)], 0)["value"] is None


def test_an_interval_is_its_seed_s():
    noise = np.random.default_rng(1).uniform(1, 2, (2, 20))
    baseline, contender = ([(float(seconds), 7) for seconds in row] for row in noise)
    first = speedup(baseline, contender, 3)
    assert first == speedup(baseline, contender, 3) != speedup(baseline, contender, 4)


@pytest.mark.slow
def test_intervals_cover_the_truth():
    generator, covered = np.random.default_rng(0), 0
    for trial in range(100):
        work = generator.lognormal(0, 1, 30)
        times = [work * generator.lognormal(0, 0.3, 30) * factor for factor in (2.0, 1.0)]
        found = speedup(*([(float(t), 10) for t in each] for each in times), trial)
        covered += found["low"] <= 2.0 <= found["high"]
    assert 85 <= covered <= 99


def test_acceptance_by_depth():
    found = acceptance([recorded((4, 2, 3), (4, 0, 1)), recorded((4, 1, 3)), recorded()])
    assert found is not None
    assert found["acceptance_histogram"] == [1, 1, 1]
    assert found["acceptance_rate_per_position"] == pytest.approx([2 / 3, 1 / 2, 0])  # of 3, 2 and 2 trees
    assert found["mean_acceptance_length"] == pytest.approx(2.0)  # 6 tokens of 3 rounds
    assert found["macro_mean_acceptance_length"] == pytest.approx(2.0)
    assert acceptance([recorded((4, 4, 4)), recorded(*[(4, 0, 4)] * 3)])["macro_mean_acceptance_length"] == 3.0


def test_conditional_acceptance_is_speed_bench_s():
    """Theirs for 2, 4 and 6 emitted tokens, one more than accepted: 0.7, 5/7 and 0.2."""
    found = acceptance([recorded(*((5, accepted, 5) for accepted in (0, 0, 0, 1, 1, 3, 3, 3, 3, 5)))])
    assert found is not None
    assert found["conditional_acceptance_rate"] == pytest.approx([0.7, 5 / 7, 1, 0.2, 1])


def test_what_is_not_known_is_not_told():
    """A device does not tell how deep its trees are."""
    assert acceptance([recorded(), recorded()]) is None
    found = acceptance([recorded((4, 2), (4, 0))])
    assert found is not None
    assert (found["acceptance_rate_per_position"], found["conditional_acceptance_rate"]) == (None, [0.5, 1.0])
