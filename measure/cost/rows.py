"""A ledger's rows: a server writes one for each request that has ended, and one now and then for its machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from specbuild.runtime.checked_json import Text, checked, decode
from specbuild.runtime.errors import OptionError

SCHEMA = 1
MAX_LINE = 1 << 16  # bytes
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Amount = Annotated[float, Meta(ge=0, le=1e15)]
Currency = Annotated[str, Meta(pattern="^[A-Z]{3}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """A request that has ended, all its samples together.

    time: its end, in ISO 8601. server: a random id of one start of a server. arm: the canary's arm, if there is one.
    busy_seconds: its share of its model's busy seconds. plain_seconds: an estimate of them with plain decoding; None if
    unknown. correction: the ratio of step times then to the bundle's timing table.
    """

    time: Text
    server: Text
    request_id: Text
    model: Text
    user: Text | None = None
    tenant: Text | None = None
    arm: Text | None = None
    speculation: Text
    finish_reasons: Annotated[dict[Text, Count], Meta(max_length=64)]  # samples
    prompt_tokens: Count
    cached_tokens: Count
    output_tokens: Count
    draft_tokens: Count
    accepted_tokens: Count
    busy_seconds: Amount
    plain_seconds: Amount | None
    correction: Amount
    kind: Literal["request"] = "request"
    schema: Literal[1] = 1

    @property
    def day(self) -> date:
        """The day of its end, in UTC."""
        return _day(self.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """A period of a server's life that ended at `time`: its length, and the busy seconds of each model in it.

    price_per_hour: the machine's price; None if not given. labels: account, provider and the like.
    """

    time: Text
    server: Text
    seconds: Amount
    busy_seconds: Annotated[dict[Text, Amount], Meta(max_length=4096)]
    price_per_hour: Amount | None = None
    currency: Currency = "USD"
    labels: Annotated[dict[Text, Text], Meta(max_length=64)] = field(default_factory=dict)
    kind: Literal["machine"] = "machine"
    schema: Literal[1] = 1

    @property
    def day(self) -> date:
        """The day of its end, in UTC."""
        return _day(self.time)


Row = RequestRow | MachineRow


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of ledgers, in the order of their files. torn: the number of lines that a crash cut off."""

    requests: list[RequestRow]
    machines: list[MachineRow]
    torn: int = 0


def line_of(row: Row) -> bytes:
    """Return a row as a line of JSON."""
    return json.dumps(asdict(row), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def read(paths: Iterable[Path]) -> Rows:
    """Return the rows of ledgers; raise OptionError for a file that is not a ledger."""
    found = Rows([], [])
    torn = 0
    for path in paths:
        for number, line in _lines(path):
            try:
                value = decode(line)
            except ValueError:
                torn += 1
                continue
            row = _row(path, number, value)
            (found.requests if isinstance(row, RequestRow) else found.machines).append(row)  # type: ignore[arg-type]
    if torn and not (found.requests or found.machines):
        raise OptionError(f"{', '.join(map(str, paths))} has no row of a ledger: give a file that serve --ledger wrote")
    return Rows(found.requests, found.machines, torn)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise OptionError(f"line {number} of {path} is too long for a ledger: give another file")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror or error}): give a ledger") from None


def _row(path: Path, number: int, value: Any) -> Row:
    kind = value.get("kind") if isinstance(value, dict) else None
    try:
        row: Row = checked(value, MachineRow) if kind == "machine" else checked(value, RequestRow)
        datetime.fromisoformat(row.time)
    except ValueError as error:
        told = f"line {number} of {path} is no row of a ledger ({str(error)[:200]})"
        raise OptionError(f"{told}: give a file that serve --ledger wrote") from None
    return row


def now() -> str:
    """Return the current time as rows store it: ISO 8601 in UTC, to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _day(time: str) -> date:
    return datetime.fromisoformat(time).astimezone(timezone.utc).date()
