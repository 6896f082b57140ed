"""`specbuild doctor`: what it says is what this machine has."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import onnxruntime
import pytest

from specbuild.cli import doctor

Command = Callable[..., Any]


def test_facts(specbuild: Command) -> None:
    outcome = specbuild("doctor", "--json")
    assert (outcome.status, outcome.err) == (0, "")
    found = json.loads(outcome.out)
    assert found["specbuild"] == version("specbuild-trt")
    assert found["ONNX Runtime"] == onnxruntime.__version__
    assert found["ONNX Runtime providers"] == onnxruntime.get_available_providers()
    assert found["build"] == "yes"
    assert found["onnxruntime bundles"] == "fp32, int8, int4; builds yes; runs yes"
    assert ("runs no" in found["tensorrt-rtx bundles"]) == (found["CUDA driver"] == "not found")
    assert isinstance(found["GPUs"], list)
    assert isinstance(found["TensorRT flavours"], list)


def test_the_table_has_every_fact(specbuild: Command) -> None:
    outcome = specbuild("doctor")
    assert (outcome.status, outcome.err) == (0, "")
    found = json.loads(specbuild("doctor", "--json").out)
    rows = outcome.out.splitlines()
    assert len(rows) == len(found)
    assert all(row.startswith(name) for row, name in zip(rows, found, strict=True))


def test_what_lacks_is_named(specbuild: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    importable = doctor._importable
    monkeypatch.setattr(doctor, "_importable", lambda module: module != "onnxscript" and importable(module))
    build = json.loads(specbuild("doctor", "--json").out)["build"]
    assert build.startswith("no")
    assert "onnxscript" in build
    assert "pip install" in build


@pytest.mark.parametrize(("name", "text"), [("GPUs", "none"), ("nvcc", "not found"), ("CUDA driver", "not found")])
def test_a_machine_with_nothing(specbuild: Command, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    monkeypatch.setattr(doctor.ctypes, "CDLL", refuse)
    (row,) = (row for row in specbuild("doctor").out.splitlines() if row.startswith(name))
    assert row.removeprefix(name).strip() == text
