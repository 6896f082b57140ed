"""Models on a CPU: the graph that fits, or one line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from specbuild.runtime import Bundle
from specbuild.runtime.backends.cpu.cores import cores
from specbuild.runtime.backends.cpu.load import load_model
from specbuild.runtime.errors import BundleError


@pytest.fixture(scope="module")
def opened(bundle: Path) -> Bundle:
    return Bundle.open(bundle)


@pytest.mark.parametrize(("batch_size", "compiled"), [(1, 1), (2, 2), (3, 4), (4, 4)])
@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_smallest_graph_that_holds_the_batch_is_loaded(
    opened: Bundle, name: str, batch_size: int, compiled: int
) -> None:
    executor = load_model(opened, name, batch_size, threads=1)
    assert executor.batch_size == compiled
    executor.close()


def test_a_graph_that_is_not_there_is_said_in_one_line(opened: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"target/batch1\.onnx cannot be read") as caught:
        load_model(Bundle(tmp_path, opened.manifest), "target", 1, threads=1)
    assert "\n" not in str(caught.value)


def test_more_threads_than_cores_are_warned_of(opened: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "specbuild"):
        load_model(opened, "draft", 1, threads=cores()).close()
        assert not caplog.records
        load_model(opened, "draft", 1, threads=cores() + 2).close()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{cores() + 2} threads on {cores()} cores")
