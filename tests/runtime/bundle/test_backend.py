"""The descriptors of backends."""

from __future__ import annotations

import importlib

import pytest

from specbuild.runtime.bundle.backend import BACKENDS, COMPILED, DEFAULT, FLOATS, find_backend
from specbuild.runtime.errors import BundleError


@pytest.mark.parametrize("name", BACKENDS)
def test_a_descriptor_names_what_there_is(name: str) -> None:
    backend = find_backend(name)
    assert backend.name == name
    for file in filter(None, (backend.lowering, backend.native_lowering)):
        module = importlib.import_module(f"specbuild.builder.lower.{file}")
        assert callable(module.lower)
        assert module.OUTPUTS["logits"] == "logits"
        assert {"tokens", "past_key", "past_value"} <= set(module.INPUTS)
    assert set(backend.dtypes) <= set(FLOATS)
    assert 0 < backend.bound < 1e-3
    assert backend.quantizes == bool(set(backend.precisions) - set(FLOATS))


def test_what_only_some_can_do() -> None:
    assert COMPILED == ("tensorrt", "tensorrt-rtx")
    assert not BACKENDS[DEFAULT].on_gpu
    assert not BACKENDS[DEFAULT].compiles
    for what, having in (("takes_plugins", ["onnxruntime-cuda", "tensorrt"]), ("times_kernels", ["tensorrt"])):
        assert [name for name, each in BACKENDS.items() if getattr(each, what)] == having
    assert not any(each.architectures for each in BACKENDS.values() if not each.compiles)


def test_a_backend_of_the_future_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(BundleError, match=r"'npu', this specbuild has onnxruntime, .*: update it"):
        find_backend("npu")
