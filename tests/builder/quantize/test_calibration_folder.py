"""Calibrated numbers outlive a refusal, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.config.scheme import parse
from specbuild.builder.pipeline import build
from specbuild.builder.quantize.calibrate import CalibrationCache
from specbuild.builder.quantize.calibration_folder import calibration_folder
from specbuild.builder.quantize.numbers import quantize
from specbuild.runtime.errors import ExecutionError, OptionError


@pytest.fixture
def config(tmp_path):
    return BuildConfig("target", tmp_path / "b", precision="int4")


def calibrated(config, error=None):
    """The folder of a layer that was kept; raises what ends the build."""
    keep = CalibrationCache(config.quantize.calibration_cache or Path("nowhere"), "model")
    keep.save(0, quantize({"a": torch.ones(2, 32)}, parse("int8", "onnxruntime")))
    if error:
        raise error
    return keep.folder


def test_a_refusal_keeps_them_and_says_where(config, tmp_path):
    where = rf"^too much \(what was calibrated is kept in {tmp_path}/\.b\.calibration for the next try\)$"
    with pytest.raises(ExecutionError, match=where), calibration_folder(config) as asked:
        calibrated(asked, ExecutionError("too much"))
    folder = tmp_path / ".b.calibration"
    assert CalibrationCache(folder, "model").load(0, ["a"])
    with calibration_folder(config) as asked:
        assert CalibrationCache(asked.quantize.calibration_cache or tmp_path, "model").load(0, ["a"])
    assert not folder.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OptionError("another")])
def test_nothing_else_does(config, tmp_path, error):
    """Nor does what is not ours go."""
    with pytest.raises(type(error)), calibration_folder(config) as asked:
        calibrated(asked, error)
    with pytest.raises(ExecutionError, match=r"^nothing calibrated$"), calibration_folder(config):
        raise ExecutionError("nothing calibrated")
    assert not list(tmp_path.iterdir())
    own = replace(config, quantize=QuantizeOptions(calibration_cache=tmp_path))
    for each in (own, BuildConfig("t", tmp_path / "b")):
        with calibration_folder(each) as used:
            assert used is each
    (tmp_path / ".b.calibration" / "own").mkdir(parents=True)
    with calibration_folder(config) as asked:
        calibrated(asked)
    assert [path.name for path in tmp_path.rglob("*")] == [".b.calibration", "own"]


@pytest.mark.nightly
def test_the_next_build_calibrates_nothing(make_sharp_checkpoint, tmp_path):
    model, output = str(make_sharp_checkpoint(tmp_path / "model", num_hidden_layers=1)), tmp_path / "out" / "b"

    def attempt(max_kl, *progress):
        options = QuantizeOptions(calib_size=2, max_kl=max_kl)
        fields = {"precision": "int4", "max_batch_size": 1, "tune": False, "quantize": options}
        build(BuildConfig(model, output, **fields), *progress)

    def layers(_):
        times.update(path.stat().st_mtime_ns for path in output.parent.rglob("layer*"))

    times = set[int]()
    with pytest.raises(ExecutionError, match="is kept in"):
        attempt(1e-9)
    assert [path.name for path in output.parent.iterdir()] == [".b.calibration"]
    attempt(9.0, layers)
    assert len(times) == 1
    assert [path.name for path in output.parent.iterdir()] == ["b"]
