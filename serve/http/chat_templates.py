"""Chat templates: those that come with specbuild, by name, and those in files."""

from __future__ import annotations

from pathlib import Path

from specbuild.runtime.errors import OptionError

SHIPPED = {"hermes": Path(__file__).with_name("hermes.jinja")}


def template_text(given: str) -> str:
    """Return the text of the chat template with this name, or in this file; raises OptionError."""
    try:
        return SHIPPED.get(given, Path(given)).read_text(encoding="utf-8")
    except (OSError, UnicodeError, ValueError) as error:
        known, why = ", ".join(SHIPPED), getattr(error, "strerror", None) or error
        told = f"{given} cannot be read as a chat template ({why})"
        raise OptionError(f"{told}: give a file, or a template that comes with specbuild: {known}") from None
