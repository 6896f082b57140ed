"""The report as one self-contained HTML file for a FinOps team: tables and plots, no scripts or external files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from specbuild.measure.bench.html import COLOURS, STYLE, plot, table

from .tables import PARTS, name_of, tables

SHOWN = 24  # maximum groups in a plot, the most expensive first


def render(found: Mapping[str, Any]) -> str:
    """Return the file's text; `found`: the result of `report`."""
    groups = sorted(found["groups"], key=lambda each: -each["cost"]) or [found["total"]]
    shown, currency = groups[:SHOWN], found["currency"]
    height = 1.2 + 0.45 * len(shown)
    title = "What requests cost"
    parts = [f"<h1>{title}</h1>", *(f'<p class="note">{escape(note)}</p>' for note in found["notes"])]
    parts += [table(*each) for each in tables(found)]
    parts += [plot(f"Output tokens per {currency}", partial(_unit_costs, groups=shown, by=found["by"]), (9, height))]
    parts += [plot(f"Cost by day, {currency}", partial(_by_day, days=found["days"]), (9, 3.6))]
    parts += [plot(f"Saved by speculation, {currency}", partial(_saved, groups=shown, by=found["by"]), (9, height))]
    head = f'<meta charset="utf-8"><title>specbuild cost</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}\n</body></html>\n'


def _bars(axes: Any, groups: Sequence[Mapping[str, Any]], key: str, offset: float, **style: Any) -> None:
    """Draw a bar with its confidence interval for each group."""
    found = [group[key] for group in groups]
    values = [each["value"] or 0.0 for each in found]
    ends = zip(found, values, strict=True)
    errors = [(0.0, 0.0) if each["low"] is None else (v - each["low"], each["high"] - v) for each, v in ends]
    places = [place + offset for place in range(len(groups))]
    axes.barh(places, values, 0.38, xerr=[[max(e, 0.0) for e in end] for end in zip(*errors, strict=True)], **style)


def _labelled(axes: Any, groups: Sequence[Mapping[str, Any]], by: Sequence[str]) -> None:
    axes.set_yticks(range(len(groups)), [name_of(each, by) or "all requests" for each in groups])
    axes.invert_yaxis()


def _unit_costs(figure: Any, groups: Sequence[Mapping[str, Any]], by: Sequence[str]) -> None:
    """Draw the tokens per unit of money, with speculation and without."""
    axes = figure.subplots()
    _bars(axes, groups, "tokens_per_unit", -0.2, color=COLOURS[1], label="as served", capsize=3)
    _bars(axes, groups, "tokens_per_unit_without", 0.2, color="#999999", label="plain decoding", capsize=3)
    _labelled(axes, groups, by)
    axes.legend(frameon=False)


def _saved(figure: Any, groups: Sequence[Mapping[str, Any]], by: Sequence[str]) -> None:
    axes = figure.subplots()
    _bars(axes, groups, "saved", 0.0, color=COLOURS[3], capsize=3)
    _labelled(axes, groups, by)


def _by_day(figure: Any, days: Sequence[Mapping[str, Any]]) -> None:
    """Draw the cost of each day's machines, stacked by purpose."""
    axes, bottom = figure.subplots(), [0.0] * len(days)
    for (key, name), colour in zip(PARTS.items(), (COLOURS[1], COLOURS[5], "#cccccc"), strict=True):
        heights = [day[key] for day in days]
        axes.bar([day["day"] for day in days], heights, bottom=bottom, color=colour, label=name)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.legend(frameon=False)
