"""`specbuild doctor`: what it says is what this machine has."""

import ctypes
import json
import sys
from importlib.metadata import version
from types import SimpleNamespace

import onnxruntime
import pytest

from specbuild.cli import doctor


def facts(specbuild):
    outcome = specbuild("doctor", "--json")
    assert (outcome.status, outcome.err) == (0, "")
    return dict(json.loads(outcome.out))


def test_facts(specbuild):
    found = facts(specbuild)
    assert found["specbuild"] == version("specbuild-trt")
    assert found["ONNX Runtime"] == onnxruntime.__version__
    assert found["ONNX Runtime providers"] == onnxruntime.get_available_providers()
    assert found["build"] == "yes"
    assert found["onnxruntime bundles"] == "fp32, int8, int4, keep; builds yes; runs yes"
    assert ("runs no" in found["tensorrt-rtx bundles"]) == (found["CUDA driver"] == "not found")
    rows = specbuild("doctor").out.splitlines()
    assert all(row.startswith(name) for row, name in zip(rows, found, strict=True))


def test_what_compiles_kernels(specbuild, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "find_library", lambda name="": tmp_path / "libspecbuild_kernels.so")
    monkeypatch.setattr(doctor, "compiler_version", lambda: "13.5")
    found = facts(specbuild)
    assert (found["NVRTC"], found["kernel library"]) == ("13.5", str(tmp_path / "libspecbuild_kernels.so"))
    assert "yes, by NVRTC" in found["CUDA kernels"]
    assert "yes, by the library" in found["CUDA kernels"]


def test_a_machine_with_nothing(specbuild, monkeypatch):
    def refuse(*_):
        raise OSError("no such library")

    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(doctor, "find_library", lambda name="": None)
    for name in ("cuda.bindings", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, None)
    found = facts(specbuild)
    assert (found["GPUs"], found["nvcc"], found["CUDA driver"]) == ([], "not found", "not found")
    assert found["build"].startswith("no, missing onnxscript: pip install")
    assert "pip install 'specbuild-trt[cuda]'" in found["NVRTC"]
    assert "SPECBUILD_CUDA=1 pip install ." in found["kernel library"]
    assert found["CUDA kernels"].count(": no") == 2


@pytest.mark.parametrize(
    ("script", "status", "gpus", "driver"),
    [
        ("echo ' NVIDIA H200, 9.0, 143771 MiB'; echo", 0, ["NVIDIA H200, 9.0, 143771 MiB"], "CUDA 13.1"),
        ("echo 'Failed to initialize NVML'; exit 9", 3, [], "found, but does not answer"),
    ],
)
def test_what_the_driver_and_its_tool_say(specbuild, monkeypatch, tmp_path, script, status, gpus, driver):
    def version_of(pointer):
        pointer._obj.value = 13010
        return status

    calls = {"cuDriverGetVersion": version_of, "cuInit": lambda _: status, "cuDeviceGetCount": lambda _: status}
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(**calls))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "tensorrt_lean.py").touch()  # as in a container that has it without pip
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    found = facts(specbuild)
    assert (found["GPUs"], found["CUDA driver"]) == (gpus, driver)
    assert "tensorrt-lean of unknown version" in found["TensorRT flavours"]
