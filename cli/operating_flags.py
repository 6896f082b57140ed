"""The flags of `specbuild serve` for canaries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from specbuild.runtime.errors import OptionError

if TYPE_CHECKING:
    from specbuild.serve.canary.assignment import CanaryOptions

_CANARY: dict[str, dict[str, Any]] = {
    "canary": {"metavar": "WHAT", "help": "Compare: speculation=auto|off|TREE, or model=NAME, another served bundle."},
    "canary-weight": {
        "type": float,
        "metavar": "PERCENT",
        "help": "The share of requests that run as the candidate; 10 by default.",
    },
    "canary-action": {
        "type": click.Choice(["rollback", "none"]),
        "help": "What proven harm does on its own; rollback by default.",
    },
    "canary-ignore": {
        "multiple": True,
        "metavar": "METRIC",
        "help": "That decides nothing: ttft, tokens_per_second or errors; may be repeated.",
    },
}
OPTIONS: list[click.Option] = [click.Option([f"--{name}"], **given) for name, given in _CANARY.items()]


def canary_options(values: dict[str, Any]) -> CanaryOptions | None:
    """Remove these flags from the command line's values and return their options, None without a canary.

    Raises OptionError for a flag that does nothing without --canary, or a bad value.
    """
    from specbuild.serve.canary.assignment import CanaryOptions

    own = {flag.removeprefix("canary-"): values.pop(flag.replace("-", "_")) for flag in _CANARY}
    candidate = own.pop("canary")
    own = {name: value for name, value in own.items() if value not in (None, ())}
    if candidate:
        return CanaryOptions(candidate=candidate, **own)
    if own:
        raise OptionError(f"--canary-{next(iter(own))} does nothing without --canary: give that too")
    return None
