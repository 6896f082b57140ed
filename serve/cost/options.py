"""Options for the machine's price, and for the ledger; validated on construction."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specbuild.runtime.errors import OptionError, shown
from specbuild.serve.option_types import Amount, check_types

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"([1-9][0-9]{0,8})(KB|MB|GB)")
MAX_OWNER = 64  # maximum number of labels
_LABEL = 256  # characters of a label's name, and of its value


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """The machine's price, and the ledger.

    Args:
        price_per_hour: Price of the machine in `currency`; None: unknown.
        currency: Code by ISO 4217.
        ledger: File with a row for each request; None: none is kept.
        ledger_rotate: "day", or a size such as 100MB at which another file is begun; None: never.
        owner: Labels of the machine's owner, each as KEY=VALUE.

    Raises:
        OptionError: If a value is wrong.
    """

    price_per_hour: Amount | None = None
    currency: str = "USD"
    ledger: Path | None = None
    ledger_rotate: str | None = None
    owner: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        if not re.fullmatch("[A-Z]{3}", self.currency):
            raise OptionError(f"currency is three capital letters such as EUR (ISO 4217), not {shown(self.currency)}")
        if self.ledger is None and (self.ledger_rotate or self.owner):
            raise OptionError("ledger_rotate and owner do nothing without a ledger: give --ledger")
        if self.ledger_rotate not in (None, "day") and not _SIZE.fullmatch(self.ledger_rotate):
            raise OptionError(f"ledger_rotate is day, or a size such as 100MB, not {shown(self.ledger_rotate)}")
        for each in self.owner:
            name, equals, value = each.partition("=")
            if not (equals and name and value and each.isprintable() and max(len(name), len(value)) <= _LABEL):
                raise OptionError(f"owner is KEY=VALUE, such as team=search, not {shown(each)}")
        if len(self.labels) < len(self.owner) or len(self.owner) > MAX_OWNER:
            raise OptionError(f"owner has {len(self.owner)} labels: give each once, at most {MAX_OWNER}")

    @property
    def labels(self) -> dict[str, str]:
        """The owner's labels by name."""
        return {name: value for name, _, value in (each.partition("=") for each in self.owner)}

    @property
    def max_bytes(self) -> int | None:
        """Size at which another file is begun; None: at none."""
        found = _SIZE.fullmatch(self.ledger_rotate or "")
        return int(found[1]) * _UNITS[found[2]] if found else None

    @property
    def per_second(self) -> float | None:
        """Price of a second; None: unknown."""
        return None if self.price_per_hour is None else self.price_per_hour / 3600
