"""A build's context says how large caches are, announces stages, and notes how long each took."""

from pathlib import Path

import pytest

from specbuild.builder.build_context import BuildContext, Stages
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.engine_options import EngineOptions
from specbuild.builder.prepare import prepare


@pytest.fixture(scope="module")
def source(make_checkpoint, tmp_path_factory):
    """A target of 100 positions."""
    folder = make_checkpoint(tmp_path_factory.mktemp("state") / "target", max_position_embeddings=100)
    return prepare(BuildConfig(str(folder), Path("b")))


def context(source, progress=lambda stage: None, **fields):
    config = BuildConfig(source.target.source, Path("b"), **fields)
    return BuildContext(config, Path("b"), source, Stages(progress, lambda phase, share: None))


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
def test_a_slot_holds_the_longest_text_and_the_largest_bucket(source, fields, rows):
    assert context(source, **fields).capacity == rows


def test_a_stage_is_announced_before_it_and_timed_after_it(source):
    told = []
    work = context(source, told.append)
    with work.stage("target: load"):
        assert (told, work.stages.seconds) == (["target: load"], {})
    with pytest.raises(ZeroDivisionError), work.stage("check"):
        _ = 1 / 0
    assert told == ["target: load", "check"]
    assert list(work.stages.seconds) == ["target: load"], "what fails took no time"
