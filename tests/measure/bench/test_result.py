"""The result holds what made-up turns with known sums come to."""

import pytest

from specbuild.runtime import Bundle


def test_sums_and_ratios(result):
    plain, drafted = result["runs"]
    names = ("speculation", "tree", "nodes", "completed", "total_output_tokens", "duration", "output_throughput")
    assert [plain[name] for name in names] == ["off", None, 0, 2, 4, 6.0, 4 / 6]
    assert [drafted[name] for name in names] == ["chain:4", "chain:4", 4, 2, 4, 3.0, 4 / 3]
    assert plain["wall_speedup"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert drafted["wall_speedup"]["value"] == pytest.approx(2.0)  # 6 s over 3 s
    assert drafted["decode_speedup"] == {"value": pytest.approx(4.0), "low": None, "high": None}  # one has decoded
    assert (plain["speculative_decoding"], drafted["outputs_equal_to_baseline"]) == (None, 2)
    assert [drafted[f"mean_{name}_ms"] for name in ("tpot", "ttft", "e2el")] == [500, 1000, 1500]


def test_a_tuned_bundle_has_no_tree_of_its_own_but_a_timing_table(untuned_and_tuned, bundle):
    untuned, tuned = untuned_and_tuned
    for result, tree in ((untuned, ("best:5", 5)), (tuned, ("policy", None))):
        assert [(run["tree"], run["nodes"]) for run in result["runs"]] == [(None, 0), ("chain:4", 4), tree]
    assert (untuned["bundle"]["timings"], tuned["bundle"]["timings"]["2"]["verify"]) == (None, [[1, 0.5], [64, 2.0]])
    assert untuned["bundle"]["digest"] == Bundle.open(bundle).manifest.digest


def test_a_round_is_the_sum_of_its_parts(result):
    found = result["runs"][1]["round"]
    assert (found["rounds"], found["tokens"], found["total_ms"]) == pytest.approx((5, 1.4, 250))
    parts = [found[f"{part}_ms"] for part in ("draft", "verify", "accept", "commit", "host")]
    assert parts == pytest.approx([20, 100, 12, 8, 110])


def test_categories_are_told_apart(result):
    math, qa = result["runs"][1]["categories"].values()
    assert (math["completed"], math["decode_speedup"]["value"]) == (1, pytest.approx(4.0))
    assert math["speculative_decoding"]["mean_acceptance_length"] == 4
    assert (qa["decode_speedup"]["value"], qa["speculative_decoding"], qa["mean_tpot_ms"]) == (None, None, None)
