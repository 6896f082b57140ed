"""A graph's tensors are the manifest's, or one line says which is not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from specbuild.runtime.backends.cpu.tensors import check_tensors, expected_tensors
from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.errors import BundleError

SPEC = ModelSpec("target", 2, 2, 4, 50, 72, 8)


def session(spec, **changes):
    sides = (
        [
            SimpleNamespace(name=name, **{"type": dtype, "shape": list(shape)} | changes.get(name, {}))
            for name, (dtype, shape) in side.items()
        ]
        for side in expected_tensors(spec)
    )
    inputs, outputs = sides
    return SimpleNamespace(get_inputs=lambda: inputs, get_outputs=lambda: outputs)


def test_what_is_expected_is_accepted():
    check_tensors(session(SPEC), SPEC)


@pytest.mark.parametrize(
    "change",
    [{"logits": {"shape": [1, None, 49]}}, {"input_ids": {"type": "tensor(int32)"}}, {"logits": {"shape": [1, None]}}],
)
def test_another_shape_or_type_is_refused(change):
    with pytest.raises(BundleError, match="the target's graph has"):
        check_tensors(session(SPEC, **change), SPEC)


def test_other_names_are_refused():
    for layers, what in ((1, "lacks"), (3, "has, and should not,")):
        with pytest.raises(BundleError, match=what):
            check_tensors(session(replace(SPEC, layers=layers)), SPEC)
