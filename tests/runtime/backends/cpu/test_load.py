"""Models on a CPU: the graph that fits, or one line."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime import Bundle
from specbuild.runtime.backends.cpu import load as cpu_load
from specbuild.runtime.backends.cpu.cores import cores
from specbuild.runtime.backends.cpu.exactness import find, machine_of
from specbuild.runtime.backends.cpu.executor import OrtExecutor
from specbuild.runtime.backends.cpu.load import keep_to_class, load_model
from specbuild.runtime.backends.exactness import ExactnessClass
from specbuild.runtime.errors import BundleError


@pytest.fixture(scope="module")
def opened(bundle: Path) -> Bundle:
    return Bundle.open(bundle)


@pytest.mark.parametrize(("batch_size", "compiled"), [(1, 1), (3, 4), (4, 4)])
def test_the_smallest_graph_that_holds_the_batch_is_loaded(opened: Bundle, batch_size: int, compiled: int) -> None:
    executor = load_model(opened, "draft", batch_size, threads=1)
    assert executor.batch_size == compiled
    executor.close()


def test_a_graph_that_is_not_there_is_said_in_one_line(opened: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"target/batch1\.onnx cannot be read") as caught:
        load_model(Bundle(tmp_path, opened.manifest), "target", 1, threads=1)
    assert "\n" not in str(caught.value)


def test_more_threads_than_cores_are_warned_of(opened: Bundle, caplog: Any, logged: Any) -> None:
    with caplog.at_level(logging.WARNING, "specbuild"):
        load_model(opened, "draft", 1, threads=cores()).close()
        assert not logged()
        load_model(opened, "draft", 1, threads=cores() + 2).close()
    (record,) = logged()
    assert record.getMessage().startswith(f"{cores() + 2} threads on {cores()} cores")


def test_a_target_keeps_to_the_class_that_its_build_found(opened: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receipt names its digest, which costs nothing on a machine of the build's; elsewhere loading computes it."""
    target = load_model(opened, "target", 1, threads=cores())
    (record,) = opened.manifest.exactness
    assert record.machine == machine_of(target)
    asked, compute = list[OrtExecutor](), find
    monkeypatch.setattr(cpu_load, "find", lambda executor: asked.append(executor) or compute(executor))
    changes: list[tuple[dict[str, Any], int]] = [
        *(
            ({}, 0),
            ({"rows": 4, "sequence_rows": 8}, 0),
            ({"machine": {"processor": "another"}}, 1),
            ({"digest": ""}, 1),
        )
    ]
    for change, computed in changes:
        asked.clear()
        records = [replace(record, **change)]
        found = keep_to_class(replace(opened, manifest=replace(opened.manifest, exactness=records)), target)
        assert found
        assert (found, found.digest, len(asked)) == (target.exactness, record.digest, computed)
        assert found == ExactnessClass(
            change.get("rows", record.rows), change.get("sequence_rows", record.sequence_rows)
        )


def test_where_there_is_none_it_is_said(opened: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    target = load_model(opened, "target", 1, threads=cores())
    none = [replace(each, rows=0, sequence_rows=0) for each in opened.manifest.exactness]
    with caplog.at_level(logging.WARNING, "specbuild"):
        assert keep_to_class(replace(opened, manifest=replace(opened.manifest, exactness=none)), target) is None
    assert target.exactness is None
    assert "steps of no shapes agree in every bit here" in caplog.text
