"""The flags of `specbuild serve` for canaries and drift."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbuild.runtime.errors import OptionError

if TYPE_CHECKING:
    from specbuild.serve.canary.assignment import CanaryOptions
    from specbuild.serve.drift.watch import DriftOptions

_FILE = click.Path(path_type=Path)
_PERCENT = {"type": float, "metavar": "PERCENT"}
_CANARY: dict[str, dict[str, Any]] = {
    "canary": {"metavar": "WHAT", "help": "Compare: speculation=auto|off|TREE, or model=NAME, another served bundle."},
    "canary-baseline": {"metavar": "WHAT", "help": "What it is compared with: asked, the default, or speculation=…"},
    "canary-weight": {**_PERCENT, "help": "The share of requests that run as the candidate at first; 10 by default."},
    "canary-step-weight": {**_PERCENT, "help": "Added every interval; 10 by default."},
    "canary-interval": {"type": float, "metavar": "SECONDS", "help": "Between two steps; 60 by default."},
    "canary-max-weight": {**_PERCENT, "help": "Where steps end; 50 by default."},
    "canary-alpha": {"type": float, "help": "Probability of rolling back what does no harm; 0.05 by default."},
    "canary-margin": {"type": float, "help": "How much slower what is promoted may be; 0.1 by default."},
    "canary-action": {
        "type": click.Choice(["rollback", "none"]),
        "help": "What a verdict does on its own; rollback by default.",
    },
    "canary-sticky": {
        "type": click.Choice(["session", "request"]),
        "help": "Whether a session, else a user, keeps its arm; session by default.",
    },
    "canary-ignore": {
        "multiple": True,
        "metavar": "METRIC",
        "help": "That decides nothing, such as ttft; may be repeated.",
    },
    "canary-objective": {
        "multiple": True,
        "metavar": "TEXT",
        "help": "That the candidate is held against: errors=0.01 (a share), ttft=0.5,p99 (seconds); may be repeated.",
    },
    "canary-state": {"type": _FILE, "metavar": "FILE", "help": "Goes on from there after a restart."},
}
_DRIFT: dict[str, dict[str, Any]] = {
    "drift": {"type": _FILE, "metavar": "FILE", "help": "Watch drift, against the reference window that FILE keeps."},
    "drift-size": {"type": int, "metavar": "N", "help": "Values of each signal in the reference; 1000 by default."},
    "drift-sample": {"type": _FILE, "metavar": "FILE", "help": "Has live texts, for specbuild distill."},
    "drift-sample-share": {
        "type": float,
        "metavar": "SHARE",
        "help": "The share of texts that go there; 0.1 by default.",
    },
}
OPTIONS: list[click.Option] = [click.Option([f"--{name}"], **given) for name, given in {**_CANARY, **_DRIFT}.items()]


def taken(given: dict[str, Any]) -> tuple[CanaryOptions | None, DriftOptions | None]:
    """Remove these flags from the given values and return their options, None for a feature that is off.

    Raises OptionError for a flag without the feature that it belongs to, or a bad value.
    """
    from specbuild.serve.canary.assignment import CanaryOptions
    from specbuild.serve.drift.watch import DriftOptions

    canary, drift = _of(_CANARY, "canary", "candidate", given), _of(_DRIFT, "drift", "reference", given)
    return (CanaryOptions(**canary) if canary else None), (DriftOptions(**drift) if drift else None)


def _of(flags: dict[str, dict[str, Any]], name: str, field: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return one feature's options by field name; empty if the feature is off."""
    values = {flag.replace("-", "_"): given.pop(flag.replace("-", "_")) for flag in flags}
    found = {field if key == name else key.removeprefix(f"{name}_"): value for key, value in values.items()}
    found = {key: value for key, value in found.items() if value not in (None, ())}
    if found and field not in found:
        raise OptionError(
            f"--{name}-{next(iter(found)).replace('_', '-')} does nothing without --{name}: give that too"
        )
    return found
