"""The table of the largest models: from headers alone, and larger memory never holds a smaller one."""

import sys
from dataclasses import replace

import pytest

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.plan import Plan

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def script(import_script):
    return import_script("checkpoints/largest_model")


def test_a_70bs_peak_is_known_from_its_headers_and_has_its_reasons(script, pair, tmp_path):
    folder = tmp_path / "70B"
    script.save_headers(script.shape("70B"), pair / "target", folder)
    weights = folder / "model.safetensors"
    assert weights.stat().st_blocks * 512 < 1 << 20 < 140e9 < weights.stat().st_size
    plan = Plan.of(BuildConfig(str(folder), tmp_path / "b"))
    for precision, cost in plan.costs()["target"].items():
        numbers = {"fp32": 4, "int8": 1, "int4": 0.5}[precision]
        assert 70e9 * numbers < cost.bundle < 1.6 * 71e9 * numbers
        assert sum(cost.build_memory_by_use.values()) == cost.build_memory
        assert len(cost.build_memory_by_use) > 1
        assert cost.build_memory_required < cost.bundle < cost.build_memory
    gpu = Plan.of(replace(plan.config, backend="onnxruntime-cuda", precision="fp16"))
    for cost in (plan.costs()["target"]["int4"], gpu.costs()["target"]["fp16"]):
        assert cost.build_memory_required <= 24 << 30


def test_the_table(script, pair, monkeypatch, capsys):
    monkeypatch.setattr(script, "SHAPES", {name: script.SHAPES[name] for name in ("1B", "8B")})
    monkeypatch.setattr(sys, "argv", ["largest_model.py", str(pair / "target")])
    script.main()
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| | 16 GB | 32 GB | 64 GB | 128 GB |"
    assert len(rows) == 4
    order = ["–", "1B", "8B"]
    for row in rows:
        cells = [cell.strip().split(", ") for cell in row.split("|")[2:-1]]
        for of_memory in zip(*cells, strict=True):
            ranks = [order.index(name) for name in of_memory]
            assert ranks == sorted(ranks)
