"""The result of tuning in words, for `build`, `tune` and `inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def in_words(found: Mapping[str, Any] | None) -> list[str]:
    """Describe tuning's report, a line each: promised and measured speedups, and whether speculation loses.

    Return no lines without a report.
    """
    if not found:
        return []
    lines, auto = list[str](), f"auto {found['auto']:.2f}× plain decoding, measured"
    if "tree" in found:
        lines.append(f"{auto}; {found['tree']} of the draft model promises {found['speedup']:.2f}×")
        if found["speedup"] < 1:
            lines.append(f"the draft model loses here: {found['tree']} promises {found['speedup']:.2f}× plain decoding")
    else:
        lines.append(f"{auto}; there is no draft, lookup alone is tuned")
    if found["auto"] < 1:
        lines.append(f"speculation loses here: on these texts auto is {found['auto']:.2f}× as fast as plain decoding")
    return lines
