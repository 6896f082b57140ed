"""The report's HTML file draws every contender, shows what was written as text, and fetches nothing."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from specbuild.measure.bench import html
from specbuild.runtime.errors import OptionError

EMPTY = frozenset({"meta", "br"})  # elements that have no end


class Page(HTMLParser):
    """A page's tags and text; every element must end where it began."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.text, self._open = list[str](), "", list[str]()
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in EMPTY:
            self._open.append(tag)
        for name, value in attrs:
            if name.split(":")[-1] in ("src", "href"):
                assert str(value).startswith("#")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in EMPTY:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_tuned_bundles_policy_and_timing_table_are_drawn(untuned_and_tuned: tuple[Any, Any]) -> None:
    for result, title in zip(untuned_and_tuned, ("auto 5 nodes", "auto what pays"), strict=True):
        page = html.render(result)
        labels = re.findall(r"<text[^>]*>(?:<tspan[^>]*>)?([^<]+)", page)
        assert title in " ".join(labels)
        assert " ".join(labels).index("chain:4") < " ".join(labels).index("auto")
        found = {"T_verify, ms", "T_draft, ms", "batch 2"} <= set(labels)
        assert found == (result is untuned_and_tuned[1]) == ("Timing table" in page)


def test_a_page_is_whole_and_shows_what_was_asked_as_text(result: Any) -> None:
    """Of plain decoding alone, whose acceptance is not drawn."""
    result |= {"command": "specbuild bench <b> & 'more'", "runs": result["runs"][:1]}
    text = html.render(result)
    page = Page(text)
    assert not {"script", "link", "img", "metadata", "b"} & {*page.tags}
    assert page.tags.count("table") == 4
    assert page.tags.count("svg") == 3  # speedups; and of the one concurrency rounds and latencies
    assert "Acceptance by depth" not in page.text
    assert result["command"] in page.text
    assert "http" not in text


def test_speedups_have_their_intervals(result: Any) -> None:
    figure = Figure()
    html._speedups(figure, {1: result["runs"]})
    (axes,) = figure.axes
    ((line, _, (bars,)),) = axes.containers
    assert line.get_xydata().tolist() == [[0, 2.0]]  # plain decoding is what the others are compared with
    assert bars.get_segments()[0].tolist() == pytest.approx(np.array([[0, 1.0], [0, 2.5]]))
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["chain:4\n4 nodes"]


def test_a_rounds_parts_lie_end_to_end(result: Any) -> None:
    figure = Figure()
    html._round_times(figure, result["runs"])
    (axes,) = figure.axes
    assert [bars.get_label() for bars in axes.containers] == ["draft", "verify", "accept", "commit", "host"]
    drafted = [bars[1] for bars in axes.containers]
    assert [bar.get_width() for bar in drafted] == pytest.approx([20, 100, 12, 8, 110])
    assert [bar.get_x() for bar in drafted] == pytest.approx([0, 20, 120, 132, 140])
    assert [text.get_text() for text in axes.texts] == ["1.50 tokens", "1.40 tokens"]


def test_a_latency_that_nobody_has_is_not_drawn(result: Any) -> None:
    plain, drafted = result["runs"]
    drafted |= {f"p{mark}_tpot_ms": None for mark in (50, 95, 99)}
    figure = Figure()
    html._latencies(figure, [plain, drafted], {"off": "#000000", "chain:4": "#0072b2"})
    assert [axes.get_title() for axes in figure.axes] == ["TTFT, ms", "TPOT, ms", "ITL, ms", "E2EL, ms"]
    assert [len(axes.lines) for axes in figure.axes] == [2, 1, 2, 2]
    assert figure.axes[1].lines[0].get_ydata().tolist() == [2000.0] * 3  # four seconds for two tokens
    assert [line.get_linestyle() for line in figure.axes[0].lines] == ["--", "-"]


def test_plots_without_their_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    html.check()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match=r"--html draws with matplotlib, which is not installed: pip install"):
        html.check()
