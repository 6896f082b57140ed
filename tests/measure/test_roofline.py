"""Bytes and FLOPs of a step by hand, the roofline they make, and steps that are really run."""

from dataclasses import asdict, replace

import pytest

from specbuild.measure.roofline import (
    Attention,
    Experts,
    Products,
    Roofline,
    cpu_peak,
    measure_device,
    timed_step,
)
from specbuild.runtime import Bundle
from specbuild.runtime.bundle.manifest import CacheShape
from specbuild.runtime.errors import ExecutionError

PLAIN = Products(parameters=1000, bytes=4100, head_dim=64, attention=(Attention(0, 4, 2 * 2 * 64, 6),))


@pytest.fixture(scope="module")
def record(bundle):
    """The reference target's: 6 layers, 2 heads of 64 in a cache of float32, 4096 tokens."""
    return Bundle.open(bundle).manifest.models["target"]


def test_a_step_by_hand(record):
    """It reads the rows, writes its own, and its logits; a node sees itself too: scores, and their sum of values."""
    rows = 6 * 2 * 2 * 64 * 4
    assert PLAIN.step(record, 1, 1, 100) == (4100 + 101 * rows + 4096 * 4 + 8, 2 * 1000 + 101 * 6 * 4 * 64 * 4)
    moved, flops = PLAIN.step(record, 3, 4, 100)
    assert moved == 4100 + 3 * (104 * rows + 4 * (4096 * 4 + 8))  # the weights once
    assert flops == 3 * (4 * 2 * 1000 + (101 + 102 + 103 + 104) * 6 * 4 * 64 * 4)


def test_caches_of_fewer_bits(record):
    half_record = replace(record, precision="fp16")
    cases = (record, 1, 1, 100), (half_record, 1, 1, 100), (half_record, 1, 1, 100, 1)
    (full, flops), (half, _), (eight, same) = (PLAIN.step(*each) for each in cases)
    values = 101 * 6 * 2 * 2 * 64
    assert (full - half, half - eight, same) == (2 * values, values, flops)


def test_states_are_read_and_written(record):
    hybrid = replace(record, caches=[CacheShape(2, 64, 64, state=50)] * record.layers)
    plain, more = (PLAIN.step(each, 3, 2, 5) for each in (record, hybrid))
    assert [more[0] - plain[0], more[1] - plain[1]] == [3 * 6 * 50 * 4 * 2, 2 * 3 * 2 * 6 * 50 * 4]


def test_a_window_bounds_what_is_seen(record):
    local = replace(PLAIN, attention=(Attention(10, 4, 2 * 2 * 64, 6),))
    near, far = (local.step(record, 1, 4, rows) for rows in (9, 1000))
    assert near == far
    assert far[1] == 4 * 2 * 1000 + 4 * 10 * 6 * 4 * 64 * 4
    assert local.step(record, 1, 1, 3) == PLAIN.step(record, 1, 1, 3)


@pytest.mark.parametrize(("nodes", "read"), [(1, 2), (3, 6), (4, 8), (16, 8)])
def test_experts_are_read_as_far_as_nodes_can_choose(record, nodes, read):
    mixed = replace(PLAIN, experts=(Experts(count=8, chosen=2, parameters=50, bytes=200, products=3),))
    assert Products.of(asdict(mixed)) == mixed, "as the report has it"
    plain, more = (each.step(record, 1, nodes, 5) for each in (PLAIN, mixed))
    assert [more[0] - plain[0], more[1] - plain[1]] == [3 * 200 * read, 2 * 3 * 50 * 2 * nodes]


@pytest.mark.parametrize(
    ("flops", "peak", "bound", "least"),
    [(500, 1000.0, "memory", 2.0), (4000, 1000.0, "compute", 4.0), (4000, None, "unknown", 2.0)],
)
def test_what_bounds_a_step(flops, peak, bound, least):
    found = Roofline(bytes=1000, flops=flops, seconds=8.0, bandwidth=500.0, peak_flops=peak).to_dict()
    assert (found["bound"], found["least_seconds"], found["share"]) == (bound, least, least / 8)
    rates = [
        found[f"{name}_per_{unit}"] for name, unit in (("bytes", "second"), ("flops", "second"), ("flops", "byte"))
    ]
    assert rates == [125.0, flops / 8, flops / 1000]


def test_the_device_is_measured(load):
    bandwidth, peak = measure_device(load("draft", 1), "int8")
    assert bandwidth > 1e6
    assert peak is None  # that of float32 is not int8's
    assert cpu_peak(64) > 1e6


def test_a_step_is_run_after_its_rows(load):
    draft = load("draft", 2)
    run = timed_step(draft, 4, 30)
    before = draft.seconds
    assert run() == pytest.approx(draft.seconds - before)
    timed_step(draft, 64, draft.spec.capacity - 64)()
    with pytest.raises(ExecutionError, match="do not fit"):
        timed_step(draft, 64, draft.spec.capacity - 63)
