"""The report as tables, for a terminal or a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PARTS: Mapping[str, str] = {"requests_cost": "requests", "other_cost": "other work", "idle_cost": "idle"}


def tables(found: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the title, header and rows of each table; `found`: the result of `report`."""
    machine, currency, by = found["machine"], found["currency"], found["by"]
    prices = ", ".join(f"{price:g}" for price in found["price_per_hour"])
    parts = [[name, "", _money(machine[key]), _share(machine[key], machine["cost"])] for key, name in PARTS.items()]
    hours = f"{machine['hours']:.4g} h at {prices} {currency}"
    whole = ["machine", hours, _money(machine["cost"]), "100%"]
    spent = (f"the machine, {currency}", ["part", "", "cost", "share"], [*parts, whole])
    header = [" ".join(by) or "requests", "requests", "output tokens", "busy s", "cost", "with idle"]
    header += ["saved", "saved %", f"tokens/{currency}", "without"]
    rows = [_row(each, name_of(each, by)) for each in found["groups"]] + [_row(found["total"], "all requests")]
    grouped = (f"requests, {currency}, with 95% intervals", header, rows)
    if measured := found["measured"]:
        told = ["baseline arm over the rest, busy seconds of a token", "", _interval(measured, "{:.2f}×")]
        return [spent, grouped, ("measured by the canary", ["", "", "ratio"], [told])]
    return [spent, grouped]


def name_of(group: Mapping[str, Any], by: Sequence[str]) -> str:
    """Return a group's name: the values of its keys."""
    return " ".join(group[name] or "–" for name in by)


def _row(group: Mapping[str, Any], name: str) -> list[str]:
    counts = [str(group["requests"]), str(group["output_tokens"]), f"{group['busy_seconds']:.2f}"]
    money = [_money(group["cost"]), _money(group["loaded_cost"]), _interval(group["saved"], "{:.4g}")]
    units = [_interval(group[name], "{:.4g}") for name in ("tokens_per_unit", "tokens_per_unit_without")]
    return [name, *counts, *money, _interval(group["saved_share"], "{:.0%}"), *units]


def _money(value: float) -> str:
    return f"{value:.4g}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _interval(value: Mapping[str, Any], form: str) -> str:
    if value["value"] is None:
        return "–"
    ends = "" if value["low"] is None else f" [{form.format(value['low'])}, {form.format(value['high'])}]"
    return form.format(value["value"]) + ends
