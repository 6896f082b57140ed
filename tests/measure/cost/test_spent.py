"""Every second of a machine is somebody's, other work's or idle, and all of them cost what the machine did."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledgers import DAY, machine, request

from specbuild.measure.cost.rows import Rows
from specbuild.measure.cost.spent import spend
from specbuild.runtime.errors import OptionError


def spent(requests, machines, **given):
    return spend(Rows(requests, machines), **given)


def parts(spending):
    """Requests', other work's, idle."""
    days = spending.days
    return sum(each.cost for each in spending.requests), sum(d.other for d in days), sum(d.idle for d in days)


def test_a_request_costs_its_busy_seconds():
    found = spent([request(1), request(2, busy_seconds=30.0, plain_seconds=None)], [machine()])
    assert [(each.cost, each.plain) for each in found.requests] == [
        (pytest.approx(0.01), pytest.approx(0.02)),
        (pytest.approx(0.03), None),
    ]
    assert parts(found) == pytest.approx((0.04, 0.06, 3.5))
    assert (found.cost, found.currency, found.price_per_hour) == (pytest.approx(3.6), "EUR", (3.6,))


def test_models_that_are_busy_at_once_share_the_seconds():
    rows = [machine(seconds=100.0, busy_seconds={"m": 80.0, "n": 80.0})]
    found = spent([request(1, busy_seconds=80.0), request(2, model="n", busy_seconds=80.0)], rows)
    assert parts(found) == pytest.approx((0.1, 0.0, 0.0))


def test_a_killed_server_was_there_until_its_last_request():
    rows = [machine(time=DAY.format(2, 10), seconds=0.0, busy_seconds={"m": 0.0})]
    found = spent([request(1, time="2026-03-02T10:00:30.000+00:00")], rows)
    assert (found.days[0].seconds, found.days[0].busy) == (30.0, 10.0)
    assert parts(found) == pytest.approx((0.01, 0.0, 0.02))


times = st.builds(DAY.format, st.integers(1, 4), st.integers(0, 23))
servers = st.sampled_from(["s1", "s2"])
busy = st.floats(0, 3600)
machines = st.builds(
    machine,
    server=servers,
    time=times,
    seconds=st.sampled_from([0.0, 60.0, 3600.0]),
    price_per_hour=st.floats(0, 9),
    busy_seconds=st.fixed_dictionaries({"m": busy, "n": busy}),
)
each_server = [machine(server=server) for server in ("s1", "s2")]


@given(st.lists(machines, max_size=6), st.lists(st.builds(request, server=servers, busy_seconds=busy, time=times)))
def test_all_parts_add_up_to_what_the_machines_cost_whatever_the_rows_say(rows, requests):
    found = spent(requests, each_server + rows)
    assert sum(parts(found)) == pytest.approx(found.cost, rel=1e-9)
    assert all(day.other >= -1e-12 and day.idle >= 0 for day in found.days)


def test_each_server_has_its_price_and_another_may_be_given():
    rows = [request(1), request(2, server="s2")], [machine(), machine(server="s2", price_per_hour=7.2)]
    assert [each.cost for each in spent(*rows).requests] == pytest.approx([0.01, 0.02])
    found = spent(*rows, price_per_hour=36.0, currency="USD")
    assert [each.cost for each in found.requests] == pytest.approx([0.1, 0.1])
    assert (found.currency, found.price_per_hour) == ("USD", (36.0,))


@pytest.mark.parametrize(
    ("machines", "words"),
    [
        ([machine(server="s2")], "s1 has requests and no machine"),
        ([machine(price_per_hour=None)], "--price-per-hour"),
        ([machine(), machine(server="s2", currency="USD")], "EUR, USD"),
    ],
)
def test_what_cannot_be_priced_is_refused(machines, words):
    with pytest.raises(OptionError, match=words):
        spent([request(1)], machines)
