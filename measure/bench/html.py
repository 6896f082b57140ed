"""The report as one self-contained HTML file: tables and plots, no scripts or external files."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from importlib.util import find_spec
from typing import Any

from specbuild.runtime.errors import OptionError

from .measure import BASELINE
from .report import notes, tables
from .result import LATENCIES, PARTS
from .statistics import PERCENTILES

COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")  # Okabe and Ito's
PART_COLOURS = ("#56b4e9", "#0072b2", "#e69f00", "#d55e00", "#999999")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd } th { vertical-align: bottom }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left } caption { text-align: left; font-weight: 600 }
svg { max-width: 100%; height: auto } code { background: #f4f4f4; padding: .1rem .3rem } p.note { color: #555 }
"""
Rows = Sequence[Mapping[str, Any]]


def check() -> None:
    """Raise OptionError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise OptionError("--html draws with matplotlib, which is not installed: pip install 'specbuild-trt[bench]'")


def render(result: Mapping[str, Any]) -> str:
    """Return the file's text; `result`: what `result.build` returned."""
    runs = result["runs"]
    names, sizes = (list(dict.fromkeys(run[key] for run in runs)) for key in ("speculation", "concurrency"))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    groups = {size: [run for run in runs if run["concurrency"] == size] for size in sizes}
    parts = [_facts(result), plot("Speedup by tree size", partial(_speedups, groups=groups), (9, 4))]
    if times := result["bundle"]["timings"]:
        parts += [plot("Timing table: seconds of a step, as tuned", partial(_step_times, times=times), (9, 3.6))]
    parts += [table(*each) for each in tables(result)]
    for size, rows in groups.items():
        drafted = [row for row in rows if row["speculative_decoding"]]
        parts += [f"<h2>Concurrency {size}</h2>"]
        parts += [plot("What a round takes", partial(_round_times, rows=rows), (9, 1 + 0.4 * len(rows)))]
        if drafted:
            draw = partial(_acceptance, rows=drafted, colours=colours)
            parts += [plot("Acceptance by depth", draw, (11, 3.6))]
        parts += [plot("Latency percentiles", partial(_latencies, rows=rows, colours=colours), (11, 3.6))]
    title = f"specbuild bench: {escape(result['bundle']['path'])}"
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    body = "\n".join([f"<h1>{title}</h1>", *parts])
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}\n</body></html>\n'


def _facts(result: Mapping[str, Any]) -> str:
    machine, bundle, settings = (result[name] for name in ("machine", "bundle", "settings"))
    told = ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in settings.items() if name != "turns" and value is not None
    )
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores; {machine['platform']}",
        ", ".join(f"{name} {value}" for name, value in {"Python": machine["python"], **machine["versions"]}.items()),
        f"bundle {bundle['digest'][:16]}…, {bundle['backend']}, default tree {bundle['default_tree']}: "
        + ", ".join(f"{k} {v['parameters']:,} parameters {v['precision']}" for k, v in bundle["models"].items()),
        told,
    ]
    note = (
        "“off” is plain decoding, to which speedups are ratios; “auto” is the bundle's default tree, in a tuned bundle "
        "what promises most in each round. All took turns on the same prompts, in one run."
    )
    body = "<br>".join(escape(line) for line in [*lines, *notes(result)])
    return f'<p><code>{escape(result["command"])}</code></p><p>{body}</p><p class="note">{escape(note)}</p>'


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with its title as HTML."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join([line(header, "th"), *(line(row, "td") for row in rows)])
    return f"<table><caption>{escape(title)}</caption>\n{body}\n</table>"


def plot(title: str, draw: Callable[[Any], None], size: tuple[float, float]) -> str:
    """Return a heading and a figure as inline SVG, with text kept as text and without references to other sites.

    Args:
        title: The heading.
        draw: Draws into the matplotlib figure that it is given.
        size: Width and height in inches.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}):
        figure, out = Figure(figsize=size, layout="constrained"), io.StringIO()
        draw(figure)
        figure.savefig(out, format="svg")
    svg = re.sub(r"<metadata>.*?</metadata>", "", out.getvalue(), flags=re.DOTALL)
    return f"<h3>{escape(title)}</h3>\n" + re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg[svg.index("<svg") :])


def _speedups(figure: Any, groups: Mapping[int, Rows]) -> None:
    """Draw wall speedups with intervals, a line per concurrency: trees in order of nodes, the policy last."""
    axes = figure.subplots()
    for number, (size, rows) in enumerate(groups.items()):
        found = sorted((row for row in rows if row["tree"]), key=lambda row: row["nodes"] or math.inf)
        values = [row["wall_speedup"]["value"] for row in found]
        bounds = ([row["wall_speedup"][end] for row in found] for end in ("low", "high"))
        errors = [[abs((b or v) - v) for b, v in zip(end, values, strict=True)] for end in bounds]
        places, colour = [i + number / 20 for i in range(len(found))], COLOURS[1 + number % (len(COLOURS) - 1)]
        axes.errorbar(places, values, errors, marker="o", capsize=3, lw=1, color=colour, label=f"concurrency {size}")
        axes.set_xticks(range(len(found)), [_title(row) for row in found])
    axes.axhline(1, color="#888888", lw=1, ls="--")
    axes.set_ylabel("wall speedup over plain decoding")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _step_times(figure: Any, times: Mapping[str, Any]) -> None:
    """Draw the step times of target and draft by nodes, a line for each batch size."""
    models = [name for name in ("verify", "draft") if all(each[name] for each in times.values())]
    for axes, name in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        for number, (batch, each) in enumerate(times.items(), 1):
            nodes, seconds = zip(*each[name], strict=True)
            style = {"marker": "o", "ms": 3, "color": COLOURS[number % len(COLOURS)], "label": f"batch {batch}"}
            axes.plot(nodes, [1e3 * s for s in seconds], **style)
        axes.set(title=f"T_{name}, ms", xlabel="nodes of each sequence")
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(frameon=False)


def _title(row: Mapping[str, Any]) -> str:
    return f"{row['speculation']}\n{row['nodes']} nodes" if row["nodes"] else f"{row['speculation']}\nwhat pays"


def _round_times(figure: Any, rows: Rows) -> None:
    """Draw a bar for each contender: the milliseconds of its mean round, by part."""
    axes, left = figure.subplots(), [0.0] * len(rows)
    names = [row["speculation"] for row in rows]
    for part, colour in zip(PARTS, PART_COLOURS, strict=True):
        widths = [row["round"][f"{part}_ms"] for row in rows]
        axes.barh(names, widths, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for name, end, row in zip(names, left, rows, strict=True):
        axes.annotate(
            f"{row['round']['tokens']:.2f} tokens", (end, name), (4, 0), textcoords="offset points", va="center"
        )
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("ms a round")
    axes.legend(frameon=False, ncols=len(PARTS), loc="lower center", bbox_to_anchor=(0.5, 1))


def _acceptance(figure: Any, rows: Rows, colours: Mapping[str, str]) -> None:
    """Draw acceptance rates by depth, conditional ones, and the share of rounds that accepted k tokens."""
    panels = figure.subplots(1, 3)
    titles = ("acceptance rate", "conditional acceptance rate", "share of rounds that accepted k")
    for axes, title in zip(panels, titles, strict=True):
        axes.set(title=title, ylim=(0, 1.02), xlabel="k drafted tokens" if "share" in title else "depth")
        axes.xaxis.get_major_locator().set_params(integer=True)
    for row in rows:
        found, style = row["speculative_decoding"], {"marker": "o", "ms": 3, "color": colours[row["speculation"]]}
        rounds = found["num_spec_steps"]
        for axes, key in zip(panels, ("acceptance_rate_per_position", "conditional_acceptance_rate"), strict=False):
            rates = found[key] or []
            axes.plot(range(1, len(rates) + 1), rates, label=row["speculation"], **style)
        panels[2].plot([count / rounds for count in found["acceptance_histogram"]], **style)
    panels[0].legend(frameon=False)


def _latencies(figure: Any, rows: Rows, colours: Mapping[str, str]) -> None:
    """Draw each contender's percentiles of every latency."""
    marks = [f"p{percentile}" for percentile in PERCENTILES]
    for axes, name in zip(figure.subplots(1, len(LATENCIES)), LATENCIES, strict=True):
        for row in rows:
            values, plain = [row[f"{mark}_{name}_ms"] for mark in marks], row["speculation"] == BASELINE
            if values[0] is not None:
                style = {"color": colours[row["speculation"]], "ls": "--" if plain else "-", "marker": "o", "ms": 4}
                axes.plot(marks, values, label=row["speculation"], **style)
        axes.set(title=f"{name.upper()}, ms")
        axes.set_ylim(bottom=0)
    figure.axes[-1].legend(frameon=False)
