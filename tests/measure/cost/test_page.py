"""The page: one file, nothing to fetch, and what people wrote stays text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from ledgers import DAY, machine, request

from specbuild.measure.cost.page import render
from specbuild.measure.cost.report import report
from specbuild.measure.cost.rows import Rows
from specbuild.measure.cost.spent import spend


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.append(tag)


def test_a_page_has_tables_and_plots_and_fetches_nothing() -> None:
    rows = [
        request(n, user="<script>alert(1)</script>" if n % 2 else "ann", time=DAY.format(1 + n % 3, 3))
        for n in range(6)
    ]
    text = render(report(spend(Rows(rows, [machine()])), ("user",)))
    tags = Tags()
    tags.feed(text)
    assert (tags.found.count("svg"), tags.found.count("table")) == (3, 2)
    assert "script" not in tags.found
    assert "&lt;script&gt;" in text
    assert not re.search(r'(src|href)="[^#]', text)
    for words in ("Output tokens per EUR", "Cost by day", "plain decoding", "2026-03-02", "saved is capacity"):
        assert words in text


def test_a_page_of_no_groups_and_of_nothing() -> None:
    for rows in ([request(1)], []):
        assert "all requests" in render(report(spend(Rows(rows, [machine()])), ()))
