"""Groups, unit costs, savings and how sure they are."""

import json
import random

import pytest
from ledgers import DAY, machine, request

from specbuild.measure.cost.report import BLOCKS, keys_of, report
from specbuild.measure.cost.rows import Rows
from specbuild.measure.cost.spent import spend
from specbuild.runtime.errors import OptionError


def told(requests, by="", **given):
    found = report(spend(Rows(requests, [machine(**given)], 0)), keys_of(by))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


def test_a_report_adds_up():
    rows = [request(1), request(2, user="bob", time=DAY.format(3, 1)), request(3, user=None)]
    found = told(rows, "user,day")
    groups = [("", "2026-03-02", 1), ("ann", "2026-03-02", 1), ("bob", "2026-03-03", 1)]
    assert [(each["user"], each["day"], each["requests"]) for each in found["groups"]] == groups
    total, whole = found["total"], found["machine"]
    assert (total["output_tokens"], total["cached_tokens"], total["busy_seconds"]) == (300, 12, 30.0)
    assert sum(each["cost"] for each in found["groups"]) == pytest.approx(total["cost"])
    sums = sum(day["cost"] for day in found["days"]), whole["requests_cost"] + whole["other_cost"] + whole["idle_cost"]
    assert (total["loaded_cost"], *sums) == pytest.approx((whole["cost"],) * 3)
    assert whole["idle_share"] == pytest.approx(whole["idle_cost"] / whole["cost"])


def test_savings_and_unit_costs():
    total = told([request(n) for n in range(10)])["total"]
    assert total["saved"] == pytest.approx({"value": 0.1, "low": 0.1, "high": 0.1})
    names = ("saved_share", "tokens_per_unit", "tokens_per_unit_without")
    assert [total[name]["value"] for name in names] == pytest.approx([0.5, 10_000, 5_000])


def test_what_has_no_estimate_saved_nothing_and_that_is_said():
    found = told([request(1), request(2, plain_seconds=None)])
    assert (found["total"]["saved"]["value"], found["total"]["baseline_seconds"]) == (pytest.approx(0.01), 30.0)
    assert any("1 requests have no estimate" in note for note in found["notes"])
    assert told([])["total"]["tokens_per_unit"] == {"value": None, "low": None, "high": None}


@pytest.mark.slow(but=("40",))
@pytest.mark.parametrize("count", [40, 3 * BLOCKS + 5])
def test_an_interval_holds_what_was_drawn_as_often_as_it_says(count):
    """Of 25 ledgers whose requests save 5 s each on average, at least 20 intervals have that."""
    drawn, held = random.Random(1), 0
    for _ in range(25):
        rows = [request(n, busy_seconds=10.0, plain_seconds=drawn.uniform(5.0, 25.0)) for n in range(count)]
        saved = told(rows, busy_seconds={"m": 10.0 * count}, seconds=1e6)["total"]["saved"]
        held += saved["low"] <= 0.005 * count <= saved["high"]
    assert 20 <= held <= 25


def test_the_canarys_baseline_measures_it_too():
    arms = {"arm": "candidate"}, {"arm": "baseline", "speculation": "off", "busy_seconds": 30.0}
    rows = [request(n, **arms[n % 2]) for n in range(20)]
    assert told(rows)["measured"] == pytest.approx({"value": 3.0, "low": 3.0, "high": 3.0})
    assert told(rows[:1])["measured"] is None


def test_keys_that_nobody_knows_are_refused():
    assert keys_of("user, day,user") == ("user", "day")
    with pytest.raises(OptionError, match="colour"):
        keys_of("user,colour")
