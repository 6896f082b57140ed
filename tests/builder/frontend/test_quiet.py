"""Libraries are silent while we work, and say what they said before it afterwards."""

import logging

import pytest
from transformers.utils import logging as bars

from specbuild.builder.frontend.quiet import quiet

TRANSFORMERS = logging.getLogger("transformers")


@pytest.fixture(autouse=True)
def _talkative():
    level, shown = TRANSFORMERS.level, bars.is_progress_bar_enabled()
    TRANSFORMERS.setLevel(logging.INFO)
    bars.enable_progress_bar()
    yield
    TRANSFORMERS.setLevel(level)
    if not shown:
        bars.disable_progress_bar()


def settings():
    return TRANSFORMERS.level, bars.is_progress_bar_enabled()


def test_a_block_is_silent_whatever_ends_it():
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
