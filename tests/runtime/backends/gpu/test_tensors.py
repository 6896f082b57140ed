"""A plan's inputs and outputs are held against what its bundle's manifest says, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.tensors import CACHES, TensorInfo, check_tensors, expected_tensors
from specbuild.runtime.errors import BundleError

SPEC = ModelSpec("target", 2, 4, 8, 50, 64, 8, (0, 16))
STATES = TensorInfo("FLOAT", (-1, -1, 24))


@pytest.mark.parametrize(("attention", "name"), [("native", "standard"), ("plugin", "plugin")])
def test_the_lowering_names_the_same_tensors(attention: str, name: str) -> None:
    lowering = pytest.importorskip(f"specbuild.builder.lower.{name}")
    found = {
        each.format(layer=layer, window=window)
        for each in (*lowering.INPUTS.values(), *lowering.OUTPUTS.values())
        for layer in range(SPEC.layers)
        for window in SPEC.windows
    }
    assert found == set(expected_tensors(SPEC, "HALF", attention))
    if attention == "plugin":
        assert found | {*lowering.PAGED.values()} == set(expected_tensors(SPEC, "HALF", attention, 16))


@pytest.mark.parametrize("attention", ["native", "plugin"])
@pytest.mark.parametrize("cache", ["HALF", "BF16", "FLOAT"])
def test_tensors_as_expected(cache: str, attention: str) -> None:
    tensors = expected_tensors(SPEC, cache, attention)
    assert check_tensors(SPEC, tensors, attention) == cache
    fixed = tensors | {"logits": replace(tensors["logits"], shape=(1, 4, 50))}
    assert check_tensors(SPEC, fixed, attention) == cache, "what may be dynamic may be fixed"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mask.16", None, r"lacks tensor mask\.16"),
        ("present_value.1", None, r"lacks tensor present_value\.1"),
        ("parents", TensorInfo("INT32", (-1, -1)), "has, and should not, tensor parents"),
        ("past_key.2", TensorInfo("HALF", (-1, 4, 64, 8)), r"has, and should not, tensor past_key\.2"),
        ("input_ids", TensorInfo("INT64", (-1, -1)), "has input_ids as .*INT64.* not .*INT32"),
        ("past_key.1", TensorInfo("FLOAT", (-1, 4, 64, 8)), r"has past_key\.1 as .*FLOAT"),
        ("past_key.0", TensorInfo("INT8", (-1, 4, 64, 8)), "a cache of INT8: build it in fp16"),
        ("past_key.0", TensorInfo("FP8", (-1, 4, 64, 8)), r"has past_key\.0 as FP8, its record a cache of auto: build"),
        ("mask.0", TensorInfo("BOOL", (-1, 1, -1, 65)), r"has mask\.0 as .*65"),
        ("logits", TensorInfo("FLOAT", (-1, -1)), "has logits as"),
        ("present_key.1", TensorInfo("HALF", (-1, 4, 64, 8)), r"has present_key\.1 as .*alias=None"),
    ],
)
def test_tensors_that_differ(name: str, change: Any, message: str) -> None:
    tensors = {**expected_tensors(SPEC, "HALF"), name: change}
    with pytest.raises(BundleError, match=f"the target's plan.*{message}"):
        check_tensors(SPEC, {key: info for key, info in tensors.items() if info})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("counts", None, "lacks tensor counts"),
        ("parents", None, "lacks tensor parents"),
        ("tree_offset", TensorInfo("INT64", (-1,)), "has tree_offset as .*INT64"),
        ("parents", TensorInfo("INT32", (-1,)), "has parents as"),
        ("mask.0", TensorInfo("BOOL", (-1, 1, -1, 64)), r"has, and should not, tensor mask\.0"),
        ("position_ids", TensorInfo("INT32", (-1, -1)), "has, and should not, tensor position_ids"),
        ("present_key.1", TensorInfo("HALF", (-1, 4, 64, 8), "past_key.1"), r"has present_key\.1 as .*alias='past"),
    ],
)
def test_tensors_of_a_plugin_that_differ(name: str, change: Any, message: str) -> None:
    tensors = {**expected_tensors(SPEC, "HALF", "plugin"), name: change}
    with pytest.raises(BundleError, match=f"the target's plan.*{message}"):
        check_tensors(SPEC, {key: info for key, info in tensors.items() if info}, "plugin")


def test_fp8_caches_are_the_record_s() -> None:
    tensors = expected_tensors(SPEC, "FP8", "plugin")
    assert check_tensors(SPEC, tensors, "plugin", "fp8") == "FP8"
    assert CACHES["FP8"] == "uint8"
    with pytest.raises(BundleError, match=r"has past_key\.0 as FP8, its record a cache of auto: build the bundle"):
        check_tensors(SPEC, tensors, "plugin")
    with pytest.raises(BundleError, match=r"has past_key\.0 as BF16, its record a cache of fp8: build the bundle"):
        check_tensors(SPEC, expected_tensors(SPEC, "BF16", "plugin"), "plugin", "fp8")
    with pytest.raises(BundleError, match=r"has past_value\.1 as .*HALF.*, not .*FP8"):
        check_tensors(SPEC, {**tensors, "past_value.1": TensorInfo("HALF", (-1, 4, 64, 8))}, "plugin", "fp8")


def test_paged_caches_are_the_record_s() -> None:
    paged, linear = (expected_tensors(SPEC, "HALF", "plugin", rows) for rows in (16, 0))
    assert (paged["page_table"].shape, paged["past_value.1"].shape) == ((-1, 64 // 16), (-1, 4, 16, 8))
    assert check_tensors(SPEC, paged, "plugin", block_size=16) == "HALF"
    for found, rows, message in (
        (paged, 0, "has, and should not, tensor page_table"),
        (linear, 16, "lacks tensor page_table"),
        (paged, 32, r"has page_table as .*-1, 4.* not .*-1, 2"),
        ({**paged, "past_key.1": linear["past_key.1"]}, 16, r"has past_key\.1 as .*64, 8.* not .*16, 8"),
    ):
        with pytest.raises(BundleError, match=f"the target's plan.*{message}"):
            check_tensors(SPEC, found, "plugin", block_size=rows)


@pytest.mark.parametrize("attention", ["native", "plugin"])
@pytest.mark.parametrize(("reads", "names"), [(False, {"hidden"}), (True, {"hidden", "hidden_in"})])
def test_hidden_states_are_those_of_the_manifest(attention: str, reads: bool, names: set[str]) -> None:
    """A head reads them and writes its own; a target whose manifest has none must not have the outputs either."""
    spec = replace(SPEC, hidden=24, reads_hidden=reads)
    tensors = expected_tensors(spec, "BF16", attention)
    assert {name: tensors[name] for name in names} == dict.fromkeys(names, STATES)
    assert tensors.keys() - expected_tensors(SPEC, "BF16", attention).keys() == names
    assert check_tensors(spec, tensors, attention) == "BF16"
    with pytest.raises(BundleError, match="the target's plan has, and should not, tensor hidden"):
        check_tensors(SPEC, tensors, attention)
    with pytest.raises(BundleError, match=r"has hidden as .*25.* not .*24"):
        check_tensors(spec, tensors | {"hidden": TensorInfo("FLOAT", (-1, -1, 25))}, attention)


def test_a_plan_without_any_tensor_lacks_the_first_by_name() -> None:
    with pytest.raises(BundleError, match=r"^the target's plan lacks tensor input_ids: build the bundle again$"):
        check_tensors(SPEC, {})
