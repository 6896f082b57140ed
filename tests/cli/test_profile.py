"""`specbuild profile`: every step counted and measured, a generation told apart, and what it refuses."""

import json
import sys

import pytest
from campaign.bundle_copy import put

from specbuild.cli import profile
from specbuild.runtime.backends import nvtx

QUICK = ("--repeat", 1, "-n", 12)
BUCKETS = [1, 2, 4, 8, 16, 32, 64]
# The reference pair by hand: per layer queries and output, keys and values, the MLP; the head, which is the embedding.


@pytest.fixture(autouse=True)
def off():
    yield
    nvtx.enabled = False


@pytest.mark.slow
def test_the_table(specbuild, bundle):
    outcome = specbuild("profile", bundle, "--tree", "chain:2", "-b", 3, *QUICK)
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].startswith("device, measured: ")
    assert lines[0].endswith(" GFLOP/s in float32")
    assert lines[1] == "steps: 3 × nodes after 256 cached tokens; chain:2"
    rows = [line.split()[:2] for line in lines if line.split()[0] in ("target", "draft")]
    assert rows == [["target", str(n)] for n in BUCKETS] + [["draft", "1"], ["draft", "2"]]
    assert any(line.startswith("rounds: ") and ", 36 tokens, " in line for line in lines)
    assert lines[-1].startswith("a round: ")


@pytest.mark.slow
def test_ranges_are_on_where_asked_and_a_cache_is_faster_than_memory(specbuild, tiny_bundle, monkeypatch):
    pytest.importorskip("nvtx")
    for bandwidth in (1.0, 1e30):
        device = bandwidth, 1e30  # bytes and operations a second
        monkeypatch.setattr(profile, "measure_device", lambda *_, device=device: device)
        outcome = specbuild("profile", tiny_bundle, "--nvtx", *QUICK)
        assert (outcome.status, nvtx.enabled) == (0, True)
        assert ("over 100%: the weights come from a cache" in outcome.out) == (bandwidth == 1.0)


def test_ranges_need_their_package(specbuild, tiny_bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert "pip install nvtx" in specbuild("profile", tiny_bundle, "--nvtx").refusal()


def test_a_report_without_products(specbuild, bundle_copy):
    report = json.loads((bundle_copy / "report.json").read_text(encoding="utf-8"))
    del report["products"]
    put(bundle_copy, "report.json", json.dumps(report).encode(), hashed=True)
    assert "build it again" in specbuild("profile", bundle_copy).refusal()


def test_a_gpu_s_bundle_fails_as_it_does_elsewhere(specbuild, bundle_copy):
    put(bundle_copy, "report.json", (bundle_copy / "report.json").read_bytes(), hashed=True, backend="onnxruntime-cuda")
    expected = specbuild("generate", bundle_copy, "-p", "x")
    assert specbuild("profile", bundle_copy).refusal(1) == expected.refusal(1)


@pytest.mark.slow
def test_json_without_a_draft(specbuild, tiny_bundle):
    found = json.loads(specbuild("profile", tiny_bundle, "--json", *QUICK).out)
    assert {each["model"] for each in found["steps"]} == {"target"}
    assert (found["context"], found["generation"]["emitted"]) == (32, 12)
