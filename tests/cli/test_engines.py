"""Bundles of engines from the command line: built without a GPU, shown, and run as far as the driver."""

import importlib.util
import json
import re
import resource

import pytest
from device import gpus

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx")
needs_no_gpu = pytest.mark.skipif(gpus() > 0, reason="needs a machine without a GPU")


@pytest.fixture(scope="module")
def used():
    """The most memory that this process had before it built anything here, other tests' included, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(scope="module")
def engines(used, pair, tmp_path_factory, build_shared):
    """The reference pair's engines in fp16, the README builds them in bf16; read them, do not change them."""
    path = tmp_path_factory.mktemp("engines") / "fp16.bundle"
    sources = {"target": str(pair / "target"), "draft": str(pair / "draft")}
    build_shared(**sources, output=path, backend="tensorrt-rtx", precision="fp16", cuda_arch=("89",))
    return path


@pytest.mark.nightly
def test_the_graph_of_a_round_is_shown(specbuild, engines):
    outcome = specbuild("inspect", engines, "--device-loop")
    assert (outcome.status, outcome.err) == (0, "")
    graph = json.loads(outcome.out)
    assert (graph["kind"], graph["condition"]) == ("conditional", "while")
    kinds = [node["kind"] for node in graph["body"]["nodes"]]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == graph["counts"]
    assert set(kinds) <= {"kernel", "memcpy", "memset", "child", "conditional"}
    assert [node["model"] for node in graph["body"]["nodes"] if node["kind"] == "child"][-1] == "target"


REFUSED = """
--backend tensorrt-rtx --arch 90 | TensorRT-RTX has no sm_90: use 75, 80, 86, 89, 120, 121
--backend tensorrt-rtx --precision fp8 --arch 80 | sm_80 has no FP8: give --arch 89 or
--backend tensorrt-rtx --precision fp8 | portable engines also run where there is no FP8
--backend tensorrt-rtx --tensor-type *=fp8 --arch 86,89 | sm_86 has no FP8
--backend tensorrt-rtx --precision auto --arch 75 | sm_75 has no INT4: give --arch 80 or
--backend tensorrt-rtx --precision bf16 --arch 75 | sm_75 has no BF16: give --arch 80 or
--backend tensorrt-rtx --buckets 1,4 | give a bucket of 2
--prompt-chunk 512 | drop --prompt-chunk
"""


NO_GPU = pytest.param("--backend tensorrt | needs a GPU to build, and here", marks=needs_no_gpu)


@pytest.mark.parametrize("case", [*REFUSED.strip().splitlines(), NO_GPU])
def test_refused_before_anything_is_built(specbuild, pair, tmp_path, case):
    flags, message = case.split(" | ")
    models = ("--target", pair / "target", "--draft", pair / "draft")
    assert message in specbuild("build", *models, "-o", tmp_path / "x.bundle", *flags.split()).refusal()
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_the_table(specbuild, engines, used, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    shown = specbuild("inspect", engines).out
    for words in (
        "portable, native attention",
        "nodes64, prompt",
        "layers; of the model's 6: attention in 6, KV-cache update in 6, rotary embedding in 6",
        "MB in all for 4 × 1024 tokens",
    ):
        assert words in shown
    report = json.loads(specbuild("inspect", engines, "--json").out)["report"]
    assert report["exactness"]["graph_logit_difference"] < 1e-3
    assert 1e-4 < report["exactness"]["bound"] < 0.5
    expected = report["expected_memory_bytes"]
    assert 0 < report["peak_memory_bytes"] < max(2 * expected, expected + used)


@pytest.mark.nightly
@needs_no_gpu
def test_loading_stops_at_the_driver(specbuild, engines):
    for command in (("generate", engines, "-p", "x"), ("verify", engines)):
        line = specbuild(*command).refusal(1)
        assert "there is no NVIDIA driver (libcuda.so.1): install one for CUDA 13" in line
    assert "which has no threads" in specbuild("generate", engines, "-p", "x", "--threads", 2).refusal()


def test_a_plan_s_profiles_are_listed(specbuild, pair, tmp_path):
    recipe = pair.parent / "pycode-jetson-orin.toml"
    shown = specbuild("build", "--recipe", recipe, "-o", tmp_path / "x", "--max-batch-size", 2, "--dry-run").out
    assert re.search(r"\nmax_batch_size +2\n", shown)
    assert re.search(r"\nprofile prompt +batch ", shown)
