"""The report's HTML file draws every contender, shows what was written as text, and fetches nothing."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
from html_page import Page
from matplotlib.figure import Figure

from specbuild.measure.bench import html
from specbuild.runtime.errors import OptionError


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
    page = Page(html.render(result))
    assert "b" not in page.tags
    assert page.tags.count("table") == 4
    assert page.tags.count("svg") == 3  # speedups; and of the one concurrency rounds and latencies
    assert "Acceptance by depth" not in page.text
    assert result["command"] in page.text


@pytest.fixture
def figures(result: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that a page of these results draws, by their headings; of one a latency is not known."""
    drawn: dict[str, Figure] = {}
    result["runs"][1] |= {f"p{mark}_tpot_ms": None for mark in (50, 95, 99)}
    monkeypatch.setattr(html, "plot", lambda title, draw, _: draw(drawn.setdefault(title, Figure())) or title)
    html.render(result)
    return drawn


def test_what_is_drawn_is_what_was_measured(figures: dict[str, Figure]) -> None:
    (speedups,) = figures["Speedup by tree size"].axes
    ((line, _, (bars,)),) = speedups.containers
    assert line.get_xydata().tolist() == [[0, 2.0]]  # plain decoding is what the others are compared with
    assert bars.get_segments()[0].tolist() == pytest.approx(np.array([[0, 1.0], [0, 2.5]]))
    assert [tick.get_text() for tick in speedups.get_xticklabels()] == ["chain:4\n4 nodes"]
    (rounds,) = figures["What a round takes"].axes
    assert [bars.get_label() for bars in rounds.containers] == ["draft", "verify", "accept", "commit", "host"]
    drafted = [bars[1] for bars in rounds.containers]
    assert [bar.get_width() for bar in drafted] == pytest.approx([20, 100, 12, 8, 110])
    assert [bar.get_x() for bar in drafted] == pytest.approx([0, 20, 120, 132, 140])
    latencies = figures["Latency percentiles"].axes
    assert [axes.get_title() for axes in latencies] == ["TTFT, ms", "TPOT, ms", "ITL, ms", "E2EL, ms"]
    assert [len(axes.lines) for axes in latencies] == [2, 1, 2, 2]
    assert latencies[1].lines[0].get_ydata().tolist() == [2000.0] * 3  # four seconds for two tokens


def test_plots_without_their_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    html.check()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match=r"--html draws with matplotlib, which is not installed: pip install"):
        html.check()
