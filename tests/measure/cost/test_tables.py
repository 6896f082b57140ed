"""The tables of a report."""

from ledgers import machine, request

from specbuild.measure.cost.report import report
from specbuild.measure.cost.rows import Rows
from specbuild.measure.cost.spent import spend
from specbuild.measure.cost.tables import name_of, tables


def test_tables_have_the_machine_the_groups_and_what_the_canary_measured():
    rows = [request(1), request(2, user=None, arm="baseline", speculation="off", busy_seconds=20.0)]
    spent, grouped, measured = tables(report(spend(Rows(rows, [machine()])), ("user",)))
    assert [row[0] for row in spent[2]] == ["requests", "other work", "idle", "machine"]
    assert spent[2][3] == ["machine", "1 h at 3.6 EUR", "3.6", "100%"]
    assert [row[:2] for row in grouped[2]] == [["–", "1"], ["ann", "1"], ["all requests", "2"]]
    assert "tokens/EUR" in grouped[1]
    assert all(len(row) == len(grouped[1]) for row in grouped[2])
    assert measured[2][0][2] == "2.00×"
    assert len(tables(report(spend(Rows([], [machine()])), ()))) == 2


def test_a_group_is_named_by_its_keys():
    assert name_of({"user": "ann", "tenant": ""}, ("user", "tenant")) == "ann –"
