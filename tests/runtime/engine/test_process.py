"""Whose an engine is: that of the process that loaded it, and of no child. Real forks: tests/attacks/test_fork.py."""

from __future__ import annotations

import os

import pytest

from specbuild.runtime.engine.process import Home
from specbuild.runtime.errors import EngineClosedError


def test_a_child_has_left_home(monkeypatch: pytest.MonkeyPatch) -> None:
    home, pid = Home(), os.getpid()
    home.check()
    assert not home.left
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    assert home.left
    with pytest.raises(EngineClosedError, match="load the bundle in each worker, after the fork"):
        home.check()
