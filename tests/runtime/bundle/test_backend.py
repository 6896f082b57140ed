"""The descriptors of backends."""

import importlib

import pytest

from specbuild.runtime.bundle.backend import BACKENDS, FLOATS, find_backend
from specbuild.runtime.errors import BundleError


@pytest.mark.parametrize("name", BACKENDS)
def test_a_descriptor_names_what_there_is(name):
    backend = find_backend(name)
    assert backend.name == name
    for file in filter(None, (backend.lowering, backend.native_lowering)):
        module = importlib.import_module(f"specbuild.builder.lower.{file}")
        assert callable(module.lower)
        assert module.OUTPUTS["logits"] == "logits"
        assert {"tokens", "past_key", "past_value"} <= set(module.INPUTS)
    assert set(backend.dtypes) <= set(FLOATS)
    assert 0 < backend.bound < 1e-3
    assert backend.compiles <= backend.on_gpu
    assert backend.compiles or not backend.architectures
    assert backend.quantizes == bool(set(backend.precisions) - set(FLOATS))


def test_a_backend_of_the_future_is_refused_with_those_that_are_known():
    with pytest.raises(BundleError, match=r"'npu', this specbuild has onnxruntime, .*: update it"):
        find_backend("npu")
