"""The `specbuild` command. Each subcommand is a module of its own, imported when it is called."""

from __future__ import annotations


def main() -> None:
    """Run the command; nothing is imported before a signal would end it with one line."""
    from . import interrupts

    interrupts.exit_at_once()
    from .application import run

    run()
