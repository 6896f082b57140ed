"""Fixtures of the command line's tests: a small bundle with a chat template."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Outcome as Outcome

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that builds fast, with a chat template; read it, do not change it."""
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", num_hidden_layers=1)
    logging.getLogger("torch.__trace").propagate = False  # thousands of records that pytest would keep
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny_bundle(tiny: Path, tmp_path_factory: pytest.TempPathFactory, build_shared: Callable[..., object]) -> Path:
    """A small bundle without a draft; read it, do not change it."""
    path = tmp_path_factory.mktemp("bundles") / "tiny.bundle"
    build_shared(target=str(tiny), output=path, max_seq_len=64, max_batch_size=1)
    return path
