"""The page: one file, nothing to fetch, and what people wrote stays text."""

import pytest
from html_page import Page
from ledgers import DAY, machine, request

from specbuild.measure.cost.page import render
from specbuild.measure.cost.report import report
from specbuild.measure.cost.rows import Rows
from specbuild.measure.cost.spent import spend


@pytest.mark.slow
def test_a_page_has_tables_and_plots_and_fetches_nothing():
    users = "ann", "<script>alert(1)</script>"
    rows = [request(n, user=users[n % 2], time=DAY.format(1 + n % 3, 3)) for n in range(6)]
    page = Page(render(report(spend(Rows(rows, [machine()])), ("user",))))
    assert (page.tags.count("svg"), page.tags.count("table")) == (3, 2)
    assert all(words in page.text for words in ("<script>", "Cost by day", "plain decoding", "2026-03-02"))


def test_a_page_of_no_groups_and_of_nothing():
    for rows in ([request(1)], []):
        assert "all requests" in render(report(spend(Rows(rows, [machine()])), ()))
