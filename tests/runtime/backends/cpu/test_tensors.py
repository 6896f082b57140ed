"""A graph's tensors are the manifest's, or one line says which is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specbuild.runtime.backends.cpu.tensors import check_tensors, expected_tensors
from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.errors import BundleError

SPEC = ModelSpec("target", 2, 2, 4, 50, 72, 8)


def session(spec: ModelSpec, batch_size: int, **changes: Any) -> Any:
    sides = (
        [
            SimpleNamespace(name=name, **{"type": dtype, "shape": list(shape)} | changes.get(name, {}))
            for name, (dtype, shape) in side.items()
        ]
        for side in expected_tensors(spec, batch_size)
    )
    inputs, outputs = sides
    return SimpleNamespace(get_inputs=lambda: inputs, get_outputs=lambda: outputs)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_what_is_expected_is_accepted(batch_size: int) -> None:
    check_tensors(session(SPEC, batch_size), SPEC, batch_size)


@pytest.mark.parametrize(
    "change",
    [{"logits": {"shape": [1, None, 49]}}, {"input_ids": {"type": "tensor(int32)"}}, {"logits": {"shape": [1, None]}}],
)
def test_another_shape_or_type_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BundleError, match="the target's graph has"):
        check_tensors(session(SPEC, 1, **change), SPEC, 1)


def test_other_names_are_refused() -> None:
    for batch_size, what in ((1, "lacks"), (3, "has, and should not,")):
        with pytest.raises(BundleError, match=what):
            check_tensors(session(SPEC, batch_size), SPEC, 2)
