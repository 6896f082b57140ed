"""Costs by group: unit costs with and without speculation, savings, and their confidence intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.runtime.errors import OptionError

from .spent import Spending, Spent

RESAMPLES = 2000
CONFIDENCE = 0.95
BLOCKS = 128  # maximum blocks that the bootstrap draws from; with more requests, each block has several
BASELINE = "baseline"  # the canary's arm that decodes plainly
KEYS: Mapping[str, Callable[[Spent], str]] = {
    "request": lambda spent: spent.row.request_id,
    "model": lambda spent: spent.row.model,
    "user": lambda spent: spent.row.user or "",
    "tenant": lambda spent: spent.row.tenant or "",
    "day": lambda spent: spent.row.day.isoformat(),
    "speculation": lambda spent: spent.row.speculation,
    "arm": lambda spent: spent.row.arm or "",
}
_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens", "draft_tokens", "accepted_tokens")
Table = NDArray[np.float64]
_VALUES: Mapping[str, Callable[[Table], Table]] = {
    "saved": lambda sums: sums[:, 1] - sums[:, 0],
    "saved_share": lambda sums: 1 - sums[:, 0] / sums[:, 1],
    "tokens_per_unit": lambda sums: sums[:, 2] / sums[:, 0],
    "tokens_per_unit_without": lambda sums: sums[:, 2] / sums[:, 1],
}
Interval = dict[str, float | None]


def keys_of(given: str) -> tuple[str, ...]:
    """Return the keys in a text such as `user,day`; raise OptionError for an unknown one."""
    names = tuple(dict.fromkeys(each.strip() for each in given.split(",") if each.strip()))
    if unknown := [name for name in names if name not in KEYS]:
        raise OptionError(f"--by {unknown[0][:80]!r} is none of {', '.join(KEYS)}")
    return names


def report(spending: Spending, by: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """Return all costs and those of each group of requests, for JSON.

    Args:
        spending: The priced requests and days.
        by: The keys, of `KEYS`, by which requests are grouped.
        seed: Seed of the bootstrap.
    """
    groups = defaultdict[tuple[str, ...], list[Spent]](list)
    for each in spending.requests:
        groups[tuple(KEYS[name](each) for name in by)].append(each)
    requested = sum(each.cost for each in spending.requests)
    loaded = spending.cost / requested if requested else 1.0
    found = [dict(zip(by, key, strict=True)) | _summary(groups[key], loaded, seed) for key in sorted(groups) if by]
    return {
        "currency": spending.currency,
        "price_per_hour": list(spending.price_per_hour),
        "machine": _machine(spending, requested),
        "total": _summary(spending.requests, loaded, seed),
        "measured": _measured(spending.requests, seed),
        "by": list(by),
        "groups": found,
        "days": _days(spending),
        "notes": _notes(spending),
    }


def _machine(spending: Spending, requested: float) -> dict[str, Any]:
    days = spending.days
    seconds, cost = sum(day.seconds for day in days), spending.cost
    other, idle = sum(day.other for day in days), sum(day.idle for day in days)
    return {
        "hours": seconds / 3600,
        "busy_hours": sum(day.busy for day in days) / 3600,
        "cost": cost,
        "requests_cost": requested,
        "other_cost": other,
        "idle_cost": idle,
        "idle_share": idle / cost if cost else None,
    }


def _summary(group: Sequence[Spent], loaded: float, seed: int) -> dict[str, Any]:
    """Return one group's sums; a request without an estimate of plain decoding counts as saving nothing."""
    rows = [each.row for each in group]
    cost, plain = sum(each.cost for each in group), sum(_plain(each) for each in group)
    table = _blocks([(each.cost, _plain(each), each.row.output_tokens) for each in group])
    return {
        "requests": len(group),
        **{name: sum(getattr(row, name) for row in rows) for name in _COUNTS},
        "busy_seconds": sum(row.busy_seconds for row in rows),
        "baseline_seconds": sum(row.busy_seconds if (p := row.plain_seconds) is None else p for row in rows),
        "cost": cost,
        "loaded_cost": cost * loaded,
        "baseline_cost": plain,
        **_intervals(table, seed),
    }


def _plain(spent: Spent) -> float:
    return spent.cost if spent.plain is None else spent.plain


def _measured(requests: Sequence[Spent], seed: int) -> Interval | None:
    """Return busy seconds per token of the canary's baseline arm over those of the rest; None without such an arm.

    This needs no timing table, because requests are assigned to arms at random.
    """
    arms = [
        [(each.row.busy_seconds, each.row.output_tokens) for each in requests if _is_baseline(each) is wanted]
        for wanted in (True, False)
    ]
    if not any(_is_baseline(each) for each in requests) or not all(sum(t for _, t in arm) for arm in arms):
        return None
    first, second = (_blocks(arm) for arm in arms)
    drawn = [_bootstrap(table, seed + number) for number, table in enumerate((first, second))]

    def ratio(base: Table, rest: Table) -> Table:
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Table = base[:, 0] / base[:, 1] / (rest[:, 0] / rest[:, 1])
        return found

    value = float(ratio(first.sum(axis=0)[None], second.sum(axis=0)[None])[0])
    return _bounded(value, ratio(*drawn) if min(len(first), len(second)) > 1 else None)


def _is_baseline(spent: Spent) -> bool:
    return spent.row.arm == BASELINE and spent.row.speculation == "off"


def _blocks(values: Sequence[Sequence[float]]) -> Table:
    """Return the sums of at most BLOCKS blocks of requests; drawing whole blocks bounds the bootstrap's time."""
    table = np.array(values, dtype=np.float64).reshape(len(values), len(values[0]) if values else 3)
    if len(table) <= BLOCKS:
        return table
    found = np.zeros((BLOCKS, table.shape[1]))
    np.add.at(found, np.arange(len(table)) % BLOCKS, table)
    return found


def _bootstrap(table: Table, seed: int) -> Table:
    """Return the sums of bootstrap samples, drawn with replacement (Efron 1979): `[resamples, columns]`."""
    count = len(table)
    times = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    found: Table = times @ table
    return found


def _intervals(table: Table, seed: int) -> dict[str, Interval]:
    """Return each of `_VALUES` with its interval; None where undefined. `table`: columns cost, plain cost, tokens."""
    drawn = _bootstrap(table, seed) if len(table) > 1 else None
    found = {}
    with np.errstate(divide="ignore", invalid="ignore"):
        for name, value in _VALUES.items():
            one = float(value(table.sum(axis=0)[None])[0])
            found[name] = _bounded(one, None if drawn is None else value(drawn))
    return found


def _bounded(value: float, drawn: Table | None) -> Interval:
    if not np.isfinite(value) or drawn is None or not np.isfinite(drawn).all():
        return {"value": value if np.isfinite(value) else None, "low": None, "high": None}
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return {"value": value, "low": float(low), "high": float(high)}


def _days(spending: Spending) -> list[dict[str, Any]]:
    """Return the cost of each day's machines, in all and by purpose."""
    found: dict[str, dict[str, Any]] = {}
    for day in spending.days:
        own = found.setdefault(
            day.day.isoformat(), dict.fromkeys(("cost", "requests_cost", "other_cost", "idle_cost"), 0.0)
        )
        requested = day.requested * day.rate
        for name, value in zip(own, (day.cost, requested, day.other, day.idle), strict=True):
            own[name] += value
    return [{"day": name, **found[name]} for name in sorted(found)]


def _notes(spending: Spending) -> list[str]:
    unknown = sum(each.plain is None for each in spending.requests)
    notes = ["saved is capacity: the bill is smaller only where fewer machines are paid for it"]
    if unknown:
        notes.append(
            f"{unknown} requests have no estimate of plain decoding (no timing table): they count as saving nothing"
        )
    if spending.torn:
        notes.append(f"{spending.torn} lines were cut off by a crash and are left out")
    return notes
