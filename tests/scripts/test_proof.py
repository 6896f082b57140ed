"""The GPU proof: its stages on the stand-in card, and as far as a machine without any can run them."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from device import gpus

pytestmark = pytest.mark.nightly


@pytest.fixture
def stage(card, tmp_path, run):
    """`stage(name, **environment)`: one stage at its smallest on the stand-in card; the JSON that it left, by name."""
    places = {"OUT": str(tmp_path / "out"), "WORK": str(tmp_path / "work"), "CARRIED": str(tmp_path / "none")}

    def stage(name, **environment):
        settings = card | places | {"PYTHON": sys.executable, "SMOKE": "1"} | environment
        done = run("bash", "scripts/gpu/proof.sh", name, **settings)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        found = sorted((tmp_path / "out").rglob("*.json"))
        return {path.relative_to(tmp_path / "out").as_posix(): json.loads(path.read_text()) for path in found}

    return stage


@pytest.mark.soak
def test_a_and_b_need_the_repository_alone(stage):
    """Kernels compiled, tests and checks a process per file; then their times, by what a has compiled."""
    found = stage("a")
    assert found["probe.json"]["flavours"]["cuda.bindings"]["runs"] is True
    for name in ("tests", "memcheck", "racecheck"):
        files = {each["file"]: each for each in found[f"{name}.json"]["files"]}
        assert files["tests/plugins/test_walk.py"]["passed"] > 1
        assert not any(each.get("failed") or each.get("skipped") for each in files.values())
        assert found[f"{name}.json"]["left"] == []
    found = stage("b", LD_LIBRARY_PATH="")  # torch is the host's here, and waits for no card
    for name in ("kernels.json", "no-bulk/kernels.json"):
        assert found[name]["tree_attention"]
        assert all(row["error"] < 2e-2 for row in found[name]["tree_attention"])


@pytest.mark.soak(only=("ort-cuda-fp32-onnxruntime-cuda", "rtx-fp16-tensorrt-rtx"))
@pytest.mark.parametrize(("name", "backend"), [("ort-cuda-fp32", "onnxruntime-cuda"), ("rtx-fp16", "tensorrt-rtx")])
def test_c_and_d_hold_a_bundle_against_the_cpu(stage, card, card_bundle, bundle, tmp_path, name, backend):
    """Exactness first, then each way's times; what d holds it has built, for no card that is lent runs it."""
    carried = name.startswith("ort")
    shutil.copytree(bundle, tmp_path / "bundles" / "cpu-fp32.bundle")
    if carried:
        shutil.copytree(card_bundle(backend), tmp_path / "bundles" / f"{name}.bundle")
    installed = os.pathsep.join([str(Path(sys.executable).parent), card["PATH"]])
    found = stage("c" if carried else "d", BUNDLES_AT=str(tmp_path / "bundles"), PATH=installed)
    result = found[f"engines-{name}.json"]
    assert result["exactness"]["exact"] == {"the CPU's": True, "its own": True}
    first = result["speed"]["batch 1"]
    assert {"topk:2,3, enqueue", "topk:2,3, resident", "default"} <= first["ways"].keys()
    assert first["uncaptured"] == []
    assert result["machine"]["gpu"].startswith("stand-in card")
    assert f"engines-{name}-cudnn.json" in found if carried else found["rtx.json"]["listed"]


@pytest.fixture
def shape(import_script, make_checkpoint, tmp_path):
    """A toy's shape without weights, for the stage to find."""
    sizes = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    toy = make_checkpoint(tmp_path / "toy", **sizes) / "config.json"
    out = tmp_path / "bundles" / "shape-toy.bundle"
    out.parent.mkdir()
    options = ["--like", str(toy), "--precision", "int4", "--max-seq-len", "384", "--max-batch-size", "2"]
    assert import_script("gpu/make_shape").main([str(out), *options]) == 0
    return out


def test_e_makes_the_weights_and_measures_the_shape(stage, shape):
    """Its tokens are those that the weights foretell, in plain decoding and in rounds as they were recorded."""
    found = stage("e", BUNDLES_AT=str(shape.parent))[f"{shape.stem}.json"]
    assert found["source"].endswith("weights drawn by seed 0")
    assert found["left"] == []
    for batch in ("1", "2"):
        result = found["batches"][batch]
        assert set(result["foretold"].values()) == {True}
        assert {"1", "2", "64"} <= result["contexts"]["64"]["steps_ms"].keys()
        assert result["ways"]["off"]["tokens_per_round"] == int(batch)
        assert result["ways"]["best:15"]["tokens_per_round"] > 1.5 * int(batch)


def test_a_card_that_is_not_listed_is_all_there_is_to_say(stage):
    found = stage("d", CARD_RTX_LISTS="75,80,86,89,120,121")
    assert list(found) == ["rtx.json"]
    assert found["rtx.json"]["listed"] is False


@pytest.mark.skipif(gpus() > 0, reason="needs a machine without a GPU")
def test_without_a_card_every_stage_says_what_it_lacks(tmp_path, run):
    """And one that fails stops none."""
    done = run(
        "bash", "scripts/gpu/proof.sh", "c", "d", "e", PYTHON=sys.executable, OUT=str(tmp_path), WORK=str(tmp_path)
    )
    assert done.returncode == 1
    assert "there is no bundle ort-*" in done.stdout
    assert "there is no bundle shape-*" in done.stdout
    assert "libcuda.so.1" in json.loads((tmp_path / "rtx.json").read_text())["reason"]


def test_a_file_that_crashes_ends_no_other(tmp_path, import_script):
    run_tests = import_script("gpu/run_tests")
    for name, body in (("crash", "os.abort()"), ("fine", "pass")):
        code = f"import os, pytest\n@pytest.mark.gpu\ndef test_it():\n    {body}\n"
        (tmp_path / f"test_{name}.py").write_text(code)
    options = ["--rootdir", str(tmp_path)]
    crash, fine = (run_tests.run(str(tmp_path / f"test_{name}.py"), None, 60, options) for name in ("crash", "fine"))
    assert crash[0]["status"] not in (0, 1)
    assert "Abort" in crash[1]
    assert (fine[0]["status"], fine[0]["passed"], fine[1]) == (0, 1, "")


def test_engines_smoke(bundle, tmp_path, run):
    """The end-to-end benchmark on a CPU bundle, whose own tokens are expected; one that is not there is named."""
    engines = (sys.executable, "-m", "benchmarks.gpu.engines", "--out", tmp_path, "--smoke")
    done = run(*engines, bundle, "--cpu-bundle", bundle)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "engines-pycode.json").read_text(encoding="utf-8"))
    assert result["exactness"]["exact"] == {"the CPU's": True, "its own": True}
    assert list(result["speed"]["batch 1"]["ways"]) == ["off", "topk:2,3", "off, sampled", "default"]
    assert run(*engines, tmp_path / "none.bundle").returncode == 1
    assert "none.bundle" in json.loads((tmp_path / "engines-none.json").read_text())["failed"]
