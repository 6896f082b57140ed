"""A build that is killed at any moment leaves no half-written bundle, and the next one goes on and is the same."""

import multiprocessing
import os
import random
import shutil
import signal
import threading

import pytest

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.runtime import Bundle

PROCESSES = multiprocessing.get_context("forkserver")  # it imports torch once for all builds
STAGES = ["target: export", "target: quantize", "target: lower", "check", "quality"]
DRAW = random.Random(68)
KILLS = [(stage, DRAW.uniform(0, 0.5)) for stage in STAGES]


def build_in_process(model, output, killed_in, seconds):
    import torch

    from specbuild.builder.pipeline import build

    def progress(stage):
        if stage == killed_in:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    torch.set_num_threads(1)
    options = QuantizeOptions(calib_size=4, max_kl=9.0)
    config = BuildConfig(str(model), output, precision="int4", max_batch_size=1, max_seq_len=128, quantize=options)
    build(config, progress)


def exit_code(model, output, killed_in="", seconds=0.0):
    process = PROCESSES.Process(target=build_in_process, args=(model, output, killed_in, seconds))
    process.start()
    process.join()
    return process.exitcode


def contents(bundle):
    """All files but those that hold times."""
    files = [path for path in bundle.rglob("*") if path.is_file() and path.name not in ("report.json", "manifest.json")]
    return {path.relative_to(bundle): path.read_bytes() for path in files}


@pytest.mark.nightly
def test_nothing_is_lost_and_nothing_half_written(make_sharp_checkpoint, tmp_path):
    PROCESSES.set_forkserver_preload(["specbuild.builder.pipeline"])
    model = make_sharp_checkpoint(tmp_path / "model", num_hidden_layers=2)
    whole, output, calibrated = tmp_path / "whole" / "b", tmp_path / "killed" / "b", {}
    assert exit_code(model, whole) == 0
    for stage, seconds in KILLS:
        code = exit_code(model, output, stage, seconds)
        assert code in (0, -signal.SIGKILL)
        if output.exists():  # it was done before
            Bundle.open(output)
            shutil.rmtree(output)
            calibrated = {}
        found = {path: path.stat().st_mtime_ns for path in output.parent.rglob("layer*.safetensors")}
        assert calibrated.items() <= found.items()
        calibrated = found
    assert exit_code(model, output) == 0
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    assert contents(output) == contents(whole)
