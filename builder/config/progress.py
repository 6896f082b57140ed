"""How a stage of a build tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]  # what it does, and which share of it is done
