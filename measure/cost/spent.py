"""The cost of machine hours, split into requests, other work and idle time.

A request costs its busy seconds at the machine's price. The rest is reported apart: `other`, seconds in which the
models were busy for requests that got no answer, and `idle`. Together they are the cost of the machine. If several
models on one machine were busy at once for longer than the day lasted, a busy second costs proportionally less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime

from specbuild.runtime.errors import OptionError

from .rows import MachineRow, RequestRow, Rows


@dataclass(frozen=True, slots=True)
class Spent:
    """The cost of one request. `plain`: its estimated cost with plain decoding; None if unknown."""

    row: RequestRow
    cost: float
    plain: float | None
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Day:
    """A server's day: `seconds` that passed, `busy` seconds of its models, `requested` ones of answered requests.

    cost: of the whole day. rate: cost of a busy second.
    """

    day: date
    server: str
    seconds: float
    busy: float
    requested: float
    cost: float
    rate: float
    labels: Mapping[str, str]

    @property
    def other(self) -> float:
        """The cost of busy seconds that belong to no answered request."""
        return (self.busy - self.requested) * self.rate

    @property
    def idle(self) -> float:
        """The cost of seconds in which no model was busy."""
        return max(self.cost - self.busy * self.rate, 0.0)


@dataclass(frozen=True, slots=True)
class Spending:
    """All priced requests and days, in one currency."""

    currency: str
    price_per_hour: tuple[float, ...]
    requests: list[Spent]
    days: list[Day]
    torn: int = 0

    @property
    def cost(self) -> float:
        """The cost of all machines."""
        return sum(day.cost for day in self.days)


@dataclass(slots=True)
class _Server:
    """The rows of one start of a server, summed by day."""

    price: float | None
    currency: str
    labels: Mapping[str, str]
    ended: str = ""  # the time of the last machine row, or after `close` of the last row
    seconds: dict[date, float] = field(default_factory=lambda: defaultdict(float))
    busy: dict[date, float] = field(default_factory=lambda: defaultdict(float))
    requested: dict[date, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, row: MachineRow) -> None:
        self.ended = max(self.ended, row.time)
        self.seconds[row.day] += row.seconds
        self.busy[row.day] += sum(row.busy_seconds.values())

    def close(self, requests: Iterable[RequestRow]) -> None:
        """Add its requests in order of time; a killed server's seconds last at least until the last of them."""
        for row in requests:
            self.requested[row.day] += row.busy_seconds
            if row.time > self.ended:
                between = datetime.fromisoformat(row.time) - datetime.fromisoformat(self.ended)
                self.seconds[row.day] += between.total_seconds()
                self.ended = row.time

    def days(self, name: str, price: float) -> Iterable[Day]:
        for day in sorted({*self.seconds, *self.requested}):
            seconds, requested = self.seconds[day], self.requested[day]
            busy = max(self.busy[day], requested)  # a request counts on the day it ends, seconds before midnight too
            cost, rate = price / 3600 * seconds, price / 3600 * min(1.0, seconds / busy if busy else 1.0)
            yield Day(day, name, seconds, busy, requested, cost, rate, self.labels)


def spend(rows: Rows, price_per_hour: float | None = None, currency: str | None = None) -> Spending:
    """Price the rows of ledgers.

    Args:
        rows: The rows.
        price_per_hour: The price of each machine; None for those in the ledgers.
        currency: The currency; None for the ledgers' one. Nothing is converted.

    Raises:
        OptionError: A price is missing, currencies differ, or a server has requests but no machine rows.
    """
    servers = dict[str, _Server]()
    for row in rows.machines:
        if row.server not in servers:
            servers[row.server] = _Server(row.price_per_hour, row.currency, row.labels)
        servers[row.server].add(row)
    asked = defaultdict[str, list[RequestRow]](list)
    for request in rows.requests:
        asked[request.server].append(request)
    if unknown := asked.keys() - servers.keys():
        raise OptionError(f"server {min(unknown)} has requests and no machine: give all files of its ledger")
    if price_per_hour is None and any(server.price is None for server in servers.values()):
        raise OptionError("the ledger has no price: give --price-per-hour, here or to serve")
    currencies = {currency or server.currency for server in servers.values()}
    if len(currencies) > 1:
        raise OptionError(
            f"the ledgers are in {', '.join(sorted(currencies))}: give those of one currency, or --currency"
        )
    found, days, prices = list[Spent](), list[Day](), set[float]()
    for name, server in servers.items():
        price = (server.price or 0.0) if price_per_hour is None else price_per_hour
        prices.add(price)
        server.close(sorted(asked[name], key=lambda each: each.time))
        own = {each.day: each for each in server.days(name, price)}
        days += own.values()
        for request in asked[name]:
            found.append(_spent(request, own[request.day].rate, server.labels))
    return Spending(min(currencies, default="USD"), tuple(sorted(prices)), found, days, rows.torn)


def _spent(row: RequestRow, rate: float, labels: Mapping[str, str]) -> Spent:
    plain = None if row.plain_seconds is None else row.plain_seconds * rate
    return Spent(row, row.busy_seconds * rate, plain, labels)
