"""How far a round with drafts brings a sequence ahead of plain decoding."""

from __future__ import annotations

import pytest

from specbuild.runtime.speculation.lead import LEEWAY, MOST_LOST, gain


def test_a_round_gains_what_it_emitted_over_plain_decoding_and_loses_little() -> None:
    assert gain(3, 1.5) == pytest.approx(LEEWAY + 1.5)
    assert gain(1, 1.0) == pytest.approx(LEEWAY)
    assert gain(1, 1.4) == pytest.approx(LEEWAY - 0.4)
    assert gain(1, 9.0) == pytest.approx(LEEWAY - MOST_LOST), "what takes so long is no draft's fault"
