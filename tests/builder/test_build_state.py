"""A build's state says how large caches are, what executors are told, and how long each stage took."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specbuild.builder.build_state import BuildState
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.engine_options import EngineOptions
from specbuild.builder.config.scheme import parse
from specbuild.builder.prepare import Sources, prepare
from specbuild.builder.quantize.numbers import Quantized
from specbuild.builder.quantize.quality import Before
from specbuild.builder.quantize.stage import Quantization

FIELDS = {"num_hidden_layers": 2, "head_dim": 20, "max_position_embeddings": 100}


@pytest.fixture(scope="module")
def source(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """A target of two layers and 100 positions, whose heads no operator takes as they are."""
    folder = make_checkpoint(tmp_path_factory.mktemp("state") / "target", **FIELDS)
    return prepare(BuildConfig(str(folder), Path("b")))


@pytest.fixture
def state(source: Sources, tmp_path: Path) -> Callable[..., BuildState]:
    """`state(progress, **BuildConfig fields)`."""

    def make(progress: Any = lambda stage: None, **fields: Any) -> BuildState:
        config = BuildConfig(source.target.source, tmp_path / "b", **fields)
        return BuildState(config, tmp_path, progress, lambda phase, share: None, source)

    return make


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({}, 100 + 64),
        ({"buckets": (1, 2, 8), "tree": "chain:3"}, 100 + 8),
        ({"backend": "onnxruntime-cuda"}, 100 + 64),
        ({"backend": "tensorrt-rtx"}, 192),  # whole lots of 64
        ({"backend": "tensorrt", "engine": EngineOptions(block_size=256)}, 256),  # whole pages
    ],
)
def test_a_slot_holds_the_longest_text_and_the_largest_bucket(
    state: Callable[..., BuildState], fields: dict[str, Any], rows: int
) -> None:
    assert state(**fields).capacity == rows


def test_an_executor_is_told_what_was_emitted(state: Callable[..., BuildState]) -> None:
    """Heads of 20 lie 24 wide in the cache; the largest bucket bounds a step."""
    spec = state(buckets=(1, 2, 8), tree="chain:3").spec("target", 97)
    assert (spec.name, spec.layers, spec.kv_heads, spec.head_dim, spec.vocab_size) == ("target", 2, 2, 24, 97)
    assert (spec.capacity, spec.max_nodes, spec.windows, spec.hidden) == (108, 8, (0,), 0)


def test_only_what_is_quantized_and_runs_here_is_timed(state: Callable[..., BuildState]) -> None:
    here, elsewhere = state(), state(backend="onnxruntime-cuda")
    codes, scales = torch.zeros(2, 1, 16, dtype=torch.uint8), torch.ones(2, 1)
    numbers = {"lm_head": Quantized(parse("int8", "onnxruntime"), codes, scales)}
    for work in (here, elsewhere):
        assert (work.found("target"), work.times_steps("target")) == ({}, False)
        work.quantized["target"] = Quantization(numbers, Before([], [], []), [], [])
        work.quantized["draft"] = Quantization({}, Before([], [], []), [], ["lm_head"])
        assert work.found("target") is numbers
        assert not work.times_steps("draft")
    assert (here.times_steps("target"), elsewhere.times_steps("target")) == (True, False)


def test_a_stage_is_announced_before_it_and_timed_after_it(state: Callable[..., BuildState]) -> None:
    told: list[str] = []
    work = state(told.append)
    with work.stage("target: load"):
        assert (told, work.seconds) == (["target: load"], {})
    with work.stage("check"):
        pass
    assert told == list(work.seconds) == ["target: load", "check"]
    assert all(0 <= seconds == round(seconds, 3) for seconds in work.seconds.values())
