"""A plan's inputs and outputs are held against what its bundle's manifest says, tensor by tensor."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("attention", ["native", "plugin"])
@given(data=st.data())
def test_tensors_that_differ(attention: str, data: Any) -> None:
    """One that is missing, or too many, of another type or shape, or written elsewhere."""
    tensors = expected_tensors(SPEC, "HALF", attention)
    name = data.draw(st.sampled_from(sorted(tensors.keys() - {"past_key.0"})))
    found = tensors[name]
    others = [None, replace(found, dtype="INT64"), replace(found, shape=(*found.shape, -1))]
    others += [replace(found, alias="logits")] + [replace(found, shape=(*found.shape[:-1], 65))] * (found.shape[-1] > 0)
    other = data.draw(st.sampled_from(others))
    with pytest.raises(BundleError, match=f"the target's plan (lacks tensor|has) {re.escape(name)}"):
        check_tensors(SPEC, {key: info for key, info in (tensors | {name: other}).items() if info}, attention)
    more = {"native": "parents", "plugin": "mask.0"}[attention]
    with pytest.raises(BundleError, match=f"has, and should not, tensor {more}"):
        check_tensors(SPEC, tensors | {more: found}, attention)


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


@pytest.mark.parametrize(
    ("kind", "told"), [("INT8", "a cache of INT8: build it in fp16"), ("FP8", "its record a cache of auto")]
)
def test_a_cache_of_another_type_is_refused(kind: str, told: str) -> None:
    with pytest.raises(BundleError, match=told):
        check_tensors(SPEC, {**expected_tensors(SPEC, "HALF"), "past_key.0": TensorInfo(kind, (-1, 4, 64, 8))})
