"""`specbuild profile`: every step counted and measured, a generation told apart, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime import Bundle
from specbuild.runtime.backends import nvtx
from specbuild.runtime.bundle.bundle import file_record
from specbuild.runtime.bundle.manifest import MANIFEST

Command = Callable[..., Any]
QUICK = ("--repeat", 1, "-n", 12)
PARTS = ("draft", "verify", "accept", "commit", "host")
BUCKETS = [1, 2, 4, 8, 16, 32, 64]
# The reference pair by hand: per layer queries and output, keys and values, the MLP; the head, which is the embedding.
TARGET = 6 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768) + 256 * 4096
TARGET_NORMS = 13 * 256


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    nvtx.enabled = False


def change(bundle: Path, **fields: Any) -> None:
    """Write a manifest that has other fields, and the hashes of the files as they are."""
    manifest = Bundle.open(bundle).manifest
    files = {name: file_record(bundle / name) for name in manifest.files}
    (bundle / MANIFEST).write_text(replace(manifest, files=files, **fields).to_json(), encoding="utf-8")


def test_json(specbuild: Command, bundle: Path) -> None:
    outcome = specbuild("profile", bundle, "--json", "--context", 100, *QUICK)
    assert (outcome.status, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    assert (found["batch_size"], found["context"], found["tree"]) == (1, 100, "best:5")
    nodes = {name: [each["nodes"] for each in found["steps"] if each["model"] == name] for name in ("target", "draft")}
    assert nodes == {"target": BUCKETS, "draft": [1, 2, 4, 8]}
    assert all(each["seconds"] > 0 and each["bound"] in ("memory", "compute") for each in found["steps"])
    one = found["steps"][0]
    assert one["flops"] == 2 * TARGET + 101 * 6 * 4 * 64 * 4
    assert one["bytes"] == 4 * (TARGET + TARGET_NORMS) + 101 * 6 * 2 * 2 * 64 * 4 + 4096 * 4 + 8
    device = found["device"]
    least = max(one["bytes"] / device["bytes_per_second"], one["flops"] / device["flops_per_second"])
    assert one["least_seconds"] == pytest.approx(least)
    run = found["generation"]
    assert run["emitted"] == 12  # the warm-up's are not in it
    assert run["total_s"] == pytest.approx(sum(run[f"{part}_s"] for part in PARTS))


def test_the_table(specbuild: Command, bundle: Path) -> None:
    outcome = specbuild("profile", bundle, "--tree", "chain:2", "-b", 3, *QUICK)
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].startswith("device, measured: ")
    assert lines[0].endswith(" GFLOP/s in float32")
    assert lines[1] == "steps: 4 × nodes after 256 cached tokens; chain:2"  # what is compiled for at least 3
    rows = [line.split()[:2] for line in lines if line.split()[0] in ("target", "draft")]
    assert rows == [["target", str(n)] for n in BUCKETS] + [["draft", "1"], ["draft", "2"]]
    assert any(line.startswith("rounds: ") and ", 36 tokens, " in line for line in lines)
    assert lines[-1].startswith("a round: ")


def test_without_a_draft(specbuild: Command, tiny_bundle: Path) -> None:
    outcome = specbuild("profile", tiny_bundle, "--json", *QUICK)
    assert (outcome.status, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    assert {each["model"] for each in found["steps"]} == {"target"}
    assert found["context"] == 32


def test_ranges_are_on_where_asked(specbuild: Command, tiny_bundle: Path) -> None:
    pytest.importorskip("nvtx")
    assert specbuild("profile", tiny_bundle, "--nvtx", *QUICK).status == 0
    assert nvtx.enabled


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tree", "star:3"), "unknown tree 'star:3'"),
        (("--tree", "chain:64"), "verifies at most 63"),
        (("-b", 2), "batch size 2 is not in 1…1"),
        (("--context", 65), "--context 65 is more than the 64 tokens"),
        (("-n", 0), "-n"),
        (("-p", ""), "prompt"),
    ],
)
def test_bad_input(specbuild: Command, tiny_bundle: Path, options: tuple[Any, ...], words: str) -> None:
    assert words in specbuild("profile", tiny_bundle, *options).refusal()


def test_no_bundle(specbuild: Command, tmp_path: Path) -> None:
    assert "not a folder" in specbuild("profile", tmp_path / "none").refusal()


def test_ranges_need_their_package(specbuild: Command, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert "pip install nvtx" in specbuild("profile", tiny_bundle, "--nvtx").refusal()


def test_a_report_without_products(specbuild: Command, bundle_copy: Path) -> None:
    report = json.loads((bundle_copy / "report.json").read_text(encoding="utf-8"))
    del report["products"]
    (bundle_copy / "report.json").write_text(json.dumps(report), encoding="utf-8")
    change(bundle_copy)
    assert "build it again" in specbuild("profile", bundle_copy).refusal()


@pytest.mark.parametrize("command", ["profile", "tune"])
def test_a_report_that_was_changed_is_refused(specbuild: Command, bundle_copy: Path, command: str) -> None:
    text = (bundle_copy / "report.json").read_text(encoding="utf-8")
    (bundle_copy / "report.json").write_text(text.replace("products", "Products"), encoding="utf-8")
    assert "report.json is not what was built" in specbuild(command, bundle_copy).refusal()


def test_a_gpu_s_bundle_fails_as_it_does_elsewhere(specbuild: Command, bundle_copy: Path) -> None:
    change(bundle_copy, backend="onnxruntime-cuda")
    expected = specbuild("generate", bundle_copy, "-p", "x")
    assert specbuild("profile", bundle_copy).refusal(1) == expected.refusal(1)
