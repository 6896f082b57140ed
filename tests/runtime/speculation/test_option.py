"""What a round might do."""

from __future__ import annotations

from specbuild.runtime.speculation.option import PLAIN, Option


def test_a_rate_is_tokens_a_second() -> None:
    assert Option("lookup", 3, 2.5, 0.5).rate == 5.0
    assert (PLAIN.kind, PLAIN.nodes, PLAIN.rate, PLAIN.levels) == ("plain", 0, 1.0, 0)
