"""Bytes and FLOPs of a step by hand, the roofline they make, and steps that are really run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from host_device import HostDevice, QueuedModel
from tiny_models import BUCKETS, CAPACITY, executor

from specbuild.measure.roofline import (
    Attention,
    Experts,
    Products,
    Roofline,
    cpu_bandwidth,
    cpu_peak,
    measure_device,
    timed_step,
)
from specbuild.runtime import Bundle
from specbuild.runtime.backends.executor import Executor
from specbuild.runtime.bundle.manifest import ModelRecord
from specbuild.runtime.errors import ExecutionError

PLAIN = Products(parameters=1000, bytes=4100, head_dim=64, attention=(Attention(0, 4, 6),))


@pytest.fixture(scope="module")
def record(bundle: Path) -> ModelRecord:
    """The reference target's: 6 layers, 2 heads of 64 in a cache of float32, 4096 tokens."""
    return Bundle.open(bundle).manifest.models["target"]


def test_a_step_by_hand(record: ModelRecord) -> None:
    """It reads the rows, writes its own, and its logits; a node sees itself too: scores, and their sum of values."""
    rows = 6 * 2 * 2 * 64 * 4
    assert PLAIN.step(record, 1, 1, 100) == (4100 + 101 * rows + 4096 * 4 + 8, 2 * 1000 + 101 * 6 * 4 * 64 * 4)
    moved, flops = PLAIN.step(record, 3, 4, 100)
    assert moved == 4100 + 3 * (104 * rows + 4 * (4096 * 4 + 8))  # the weights once
    assert flops == 3 * (4 * 2 * 1000 + (101 + 102 + 103 + 104) * 6 * 4 * 64 * 4)


def test_caches_of_fewer_bits(record: ModelRecord) -> None:
    half_record = replace(record, precision="fp16")
    (full, flops), (half, _), (eight, same) = (
        PLAIN.step(*each) for each in ((record, 1, 1, 100), (half_record, 1, 1, 100), (half_record, 1, 1, 100, 1))
    )
    values = 101 * 6 * 2 * 2 * 64
    assert (full - half, half - eight, same) == (2 * values, values, flops)


def test_a_window_bounds_what_is_seen(record: ModelRecord) -> None:
    local = replace(PLAIN, attention=(Attention(10, 4, 6),))
    near, far = (local.step(record, 1, 4, rows) for rows in (9, 1000))
    assert near == far
    assert far[1] == 4 * 2 * 1000 + 4 * 10 * 6 * 4 * 64 * 4
    assert local.step(record, 1, 1, 3) == PLAIN.step(record, 1, 1, 3)


def test_experts_are_read_as_far_as_nodes_can_choose(record: ModelRecord) -> None:
    mixed = replace(PLAIN, experts=(Experts(count=8, chosen=2, parameters=50, bytes=200, products=3),))
    for nodes, read in ((1, 2), (3, 6), (4, 8), (16, 8)):
        more = [a - b for a, b in zip(mixed.step(record, 1, nodes, 5), PLAIN.step(record, 1, nodes, 5), strict=True)]
        assert more == [3 * 200 * read, 2 * 3 * 50 * 2 * nodes]


def test_as_the_report_has_it() -> None:
    mixed = replace(PLAIN, experts=(Experts(8, 2, 50, 200, 3),))
    assert Products.of(asdict(mixed)) == mixed


def test_what_bounds_a_step() -> None:
    for flops, peak, bound, least, share in (
        (500, 1000.0, "memory", 2.0, 0.25),
        (4000, 1000.0, "compute", 4.0, 0.5),
        (4000, None, "unknown", 2.0, 0.25),
    ):
        found = Roofline(bytes=1000, flops=flops, seconds=8.0, bandwidth=500.0, peak_flops=peak)
        assert (found.bound, found.least_seconds, found.share, found.intensity) == (bound, least, share, flops / 1000)
        told = found.to_dict()
        assert (told["bytes_per_second"], told["flops_per_second"]) == (125.0, flops / 8)


def test_the_device_is_measured(load: Callable[[str, int], Executor]) -> None:
    assert cpu_bandwidth(1 << 20) > 1e6
    assert cpu_peak(64) > 1e6
    bandwidth, peak = measure_device(load("draft", 1), "int8")
    assert bandwidth > 1e6
    assert peak is None  # that of float32 is not int8's


def test_a_step_is_run_after_its_rows(load: Callable[[str, int], Executor]) -> None:
    draft = load("draft", 2)
    run = timed_step(draft, 4, 30)
    before = draft.seconds
    assert run() == pytest.approx(draft.seconds - before)
    timed_step(draft, 64, draft.spec.capacity - 64)()
    with pytest.raises(ExecutionError, match="do not fit"):
        timed_step(draft, 64, draft.spec.capacity - 63)


@pytest.mark.nightly
def test_on_a_device_the_graph_alone_is_timed(tmp_path: Path) -> None:
    device = HostDevice()
    target = executor("target", device, tmp_path, 2)
    runs = {nodes: timed_step(target, nodes, 20) for nodes in BUCKETS}
    assert device.captured == len(BUCKETS)
    ran = target.model.steps  # type: ignore[attr-defined]
    ran.clear()
    for nodes in (4, 1, 4):
        assert runs[nodes]() > 0
    assert ran == [4, 4, 1, 1, 4, 4]  # its own inputs each time, then the graph
    with pytest.raises(ExecutionError, match="do not fit"):
        timed_step(target, 4, CAPACITY)


@pytest.mark.nightly
def test_a_model_that_no_graph_may_hold_is_timed_as_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueuedModel, "capturable", False)
    device = HostDevice()
    target = executor("target", device, tmp_path, 2)
    assert timed_step(target, 4, 20)() > 0
    assert (device.captured, target.model.steps) == (0, [4, 4, 4])  # type: ignore[attr-defined]
