"""Options: everything wrong with them is one line before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime.errors import OptionError
from specbuild.serve.options import ServeOptions


@pytest.mark.parametrize(
    "given",
    [
        {"port": 70000},
        {"ssl_certfile": Path("x")},
        {"ssl_certfile": Path("none"), "ssl_keyfile": Path("none")},
        {"api_keys": ("",)},
        {"api_keys": ("a\nb",)},
        {"api_keys": ("ä",)},
        {"shutdown_timeout": -1},
        {"request_timeout": 0},
        {"request_timeout": float("nan")},
        {"max_waiting": 0},
        {"max_queued_tokens": 0},
        {"metrics_prefix": "ours:"},
        {"spec_metrics": "all"},
        {"extra_fields": "keep"},
        {"root_path": "llm"},
        {"reasoning_end": ""},
        {"slo": ("tpot=soon",)},
    ],
)
def test_what_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        ServeOptions(**given)
