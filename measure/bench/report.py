"""A benchmark's result for people: tables and notes, and a check of the paths of its files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbuild.runtime.errors import OutputError

from .result import LATENCIES, PARTS

SHOWN = 8  # maximum depths in a table


def show(result: Mapping[str, Any]) -> None:
    """Print the tables and notes."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file has room for whole rows
    for title, header, rows in tables(result):
        table = Table(*header, title=title, title_justify="left", box=None)
        for column in table.columns[2:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for note in notes(result):
        console.print(note, markup=False, highlight=False)


def notes(result: Mapping[str, Any]) -> list[str]:
    """Return notes on the tables: how turns became prompts, and how many prompts ended after one token."""
    turns, runs = result["settings"].get("turns"), result["runs"]
    found = [f"turns: {turns}"] if turns else []
    ended, completed = max((run["ended_after_one_token"], run["completed"]) for run in runs)
    if ended:
        found.append(f"{ended} of {completed} prompts ended after one token: a speedup on them means nothing")
    return found


def tables(result: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the title, header and rows of each table; the first two columns are concurrency and contender."""
    header = ["concurrency", "speculation"]
    speeds = (
        "output tokens/s, speedup with 95% interval",
        [*header, "tokens/s", "wall", "decode", "same text", "one token"],
    )
    times = ("latency in ms, p50 / p99", [*header, *(name.upper() for name in LATENCIES)])
    rounds = ("a round in ms", [*header, *PARTS, "total", "tokens"])
    lengths = ["acceptance length", "macro mean"]
    drafted = ("accepted tokens, rates by depth", [*header, *lengths, "acceptance rate", "conditional"])
    sorts = ("by category", [*header, "category", "prompts", "decode", "TPOT", *lengths])
    rows: dict[Any, list[list[str]]] = {title: [] for title, _ in (speeds, times, rounds, drafted, sorts)}
    for run in result["runs"]:
        name, each = [str(run["concurrency"]), run["speculation"]], run["round"]
        ratios = [_ratio(run["wall_speedup"]), _ratio(run["decode_speedup"])]
        equal = f"{run['outputs_equal_to_baseline']} of {run['completed']}"
        rows[speeds[0]].append(
            [*name, f"{run['output_throughput']:.1f}", *ratios, equal, str(run["ended_after_one_token"])]
        )
        rows[times[0]].append([*name, *(_latency(run, latency) for latency in LATENCIES)])
        rows[rounds[0]].append([*name, *(f"{each[f'{p}_ms']:.3f}" for p in (*PARTS, "total")), f"{each['tokens']:.2f}"])
        if run["speculative_decoding"]:
            rows[drafted[0]].append([*name, *_accepted(run["speculative_decoding"])])
        for category, own in run["categories"].items():
            cells = [str(own["completed"]), _ratio(own["decode_speedup"]), _latency(own, "tpot")]
            rows[sorts[0]].append([*name, category, *cells, *_accepted(own["speculative_decoding"])[:2]])
    every = (speeds, times, rounds, drafted, sorts)
    return [(title, columns, rows[title]) for title, columns in every if rows[title]]


def _ratio(value: Mapping[str, Any]) -> str:
    if value["value"] is None:
        return "–"
    interval = value["low"] is not None and value["low"] < value["high"]
    return f"{value['value']:.2f}×" + (f" [{value['low']:.2f}, {value['high']:.2f}]" if interval else "")


def _latency(run: Mapping[str, Any], name: str) -> str:
    middle, worst = run[f"p50_{name}_ms"], run[f"p99_{name}_ms"]
    return "–" if middle is None else f"{middle:.2f} / {worst:.2f}"


def _accepted(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return ["–"] * 4
    rates = [found[name] or [] for name in ("acceptance_rate_per_position", "conditional_acceptance_rate")]
    lengths = [f"{found[name]:.2f}" for name in ("mean_acceptance_length", "macro_mean_acceptance_length")]
    return lengths + [" ".join(f"{rate:.0%}" for rate in each[:SHOWN]) + " …" * (len(each) > SHOWN) for each in rates]


def check(path: Path) -> None:
    """Raise OutputError if no file can be written at the path; called before anything is measured."""
    if path.exists() and not path.is_file():
        raise OutputError(f"{path} exists and is not a file: give another place")
    if not path.absolute().parent.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise OutputError(f"{path} cannot be written: its folder does not exist, or is not yours to write to")
