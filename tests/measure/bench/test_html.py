"""The report's HTML file draws every contender, shows what was written as text, and fetches nothing."""

import re
import sys

import pytest
from html_page import Page

from specbuild.measure.bench import html
from specbuild.runtime.errors import OptionError


@pytest.mark.slow
def test_a_tuned_bundles_policy_and_timing_table_are_drawn(untuned_and_tuned):
    for result, title in zip(untuned_and_tuned, ("auto 5 nodes", "auto what pays"), strict=True):
        page = html.render(result)
        labels = re.findall(r"<text[^>]*>(?:<tspan[^>]*>)?([^<]+)", page)
        assert title in " ".join(labels)
        assert " ".join(labels).index("chain:4") < " ".join(labels).index("auto")
        found = {"T_verify, ms", "T_draft, ms", "batch 2"} <= set(labels)
        assert found == (result is untuned_and_tuned[1]) == ("Timing table" in page)


@pytest.mark.slow
def test_a_page_is_whole_and_shows_what_was_asked_as_text(result):
    """Of plain decoding alone, whose acceptance is not drawn, and of whose latencies one is not known."""
    result |= {"command": "specbuild bench <b> & 'more'", "runs": result["runs"][:1]}
    result["runs"][0] |= {f"p{mark}_tpot_ms": None for mark in (50, 95, 99)}
    page = Page(html.render(result))
    assert "b" not in page.tags
    assert (page.tags.count("table"), page.tags.count("svg")) == (4, 3)  # speedups; rounds and latencies
    assert "Acceptance by depth" not in page.text
    assert result["command"] in page.text


def test_plots_without_their_package_are_refused(monkeypatch):
    html.check()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match=r"--html draws with matplotlib, which is not installed: pip install"):
        html.check()
