"""Libraries are silent while we work, and say what they said before it afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from transformers.utils import logging as bars

from specbuild.builder.frontend.quiet import quiet

TRANSFORMERS = logging.getLogger("transformers")


@pytest.fixture(autouse=True)
def _talkative() -> Iterator[None]:
    level, shown = TRANSFORMERS.level, bars.is_progress_bar_enabled()
    TRANSFORMERS.setLevel(logging.INFO)
    bars.enable_progress_bar()
    yield
    TRANSFORMERS.setLevel(level)
    if not shown:
        bars.disable_progress_bar()


def settings() -> tuple[int, bool]:
    return TRANSFORMERS.level, bars.is_progress_bar_enabled()


def test_a_block_is_silent_whatever_ends_it() -> None:
    with quiet():
        assert settings() == (logging.ERROR, False)
        with quiet():
            pass
        assert settings() == (logging.ERROR, False), "an inner one ends within an outer one"
    assert settings() == (logging.INFO, True)
    with pytest.raises(ZeroDivisionError), quiet():
        _ = 1 / 0
    assert settings() == (logging.INFO, True)
    bars.disable_progress_bar()
    with quiet():
        pass
    assert settings() == (logging.INFO, False), "what was off stays off"
