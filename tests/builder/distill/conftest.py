"""Fixtures: tiny targets, and the drafts that are trained of them in a few steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def target(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, not tied, far from uniform; read it, do not change it."""
    folder = tmp_path_factory.mktemp("targets") / "target"
    return make_checkpoint(folder, num_hidden_layers=3, initializer_range=0.3)


@pytest.fixture
def asked(target: Path, tmp_path: Path) -> Callable[..., Any]:
    """`asked(**DistillConfig fields)`: a distillation of a second."""
    from specbuild.builder.distill.options import DistillConfig

    def make(**fields: Any) -> DistillConfig:
        small = {"target": str(target), "output": tmp_path / "draft", "generate": 96, "sequence_length": 24}
        few = {"depth": 3, "steps": 6, "batch_size": 2, "eval_every": 2, "save_every": 2, "dtype": "fp32"}
        return DistillConfig(**small | few | {"draft_vocab_size": 64} | fields)

    return make
