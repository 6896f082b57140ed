"""The `specbuild` command. Each subcommand is a module of its own, imported when it is called."""

from __future__ import annotations


def main() -> None:
    """Run the command; the signal handlers are installed before anything slow is imported."""
    from . import interrupts

    interrupts.exit_at_once()
    from .application import run

    run()
