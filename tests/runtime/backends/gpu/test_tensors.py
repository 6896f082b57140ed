"""A plan's inputs and outputs are held against what its bundle's manifest says, tensor by tensor."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.runtime.backends.executor import ModelSpec
from specbuild.runtime.backends.gpu.tensors import TensorInfo, check_tensors, expected_tensors
from specbuild.runtime.errors import BundleError

SPEC = ModelSpec("target", 2, 4, 8, 50, 64, 8, (0, 16))
STATES = TensorInfo("FLOAT", (-1, -1, 24))


@pytest.mark.parametrize(("attention", "name"), [("native", "standard"), ("plugin", "plugin")])
def test_the_lowering_names_the_same_tensors(attention, name):
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
@pytest.mark.parametrize("hidden", [set(), {"hidden"}, {"hidden", "hidden_in"}], ids=len)
@pytest.mark.parametrize("cache", ["HALF", "BF16", "FLOAT"])
def test_tensors_as_expected(cache, hidden, attention):
    """A head reads hidden states and writes its own; a target whose manifest has none must not have the outputs."""
    spec = replace(SPEC, hidden=24 * bool(hidden), reads_hidden="hidden_in" in hidden)
    tensors, without = (expected_tensors(each, cache, attention) for each in (spec, SPEC))
    assert tensors == without | dict.fromkeys(hidden, STATES)
    fixed = tensors | {"logits": replace(tensors["logits"], shape=(1, 4, 50))}
    for each in (tensors, fixed):  # what may be dynamic may be fixed
        assert check_tensors(spec, each, attention) == cache
    if hidden:
        with pytest.raises(BundleError, match="the target's plan has, and should not, tensor hidden"):
            check_tensors(SPEC, tensors, attention)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["native", "plugin"])
@given(data=st.data())
def test_tensors_that_differ(attention, data):
    """One that is missing, or too many, of another type or shape, or written elsewhere."""
    tensors = expected_tensors(SPEC, "HALF", attention)
    name = data.draw(st.sampled_from(sorted(tensors.keys() - {"past_key.0"})))
    found = tensors[name]
    others = [replace(found, dtype="INT64"), replace(found, shape=(*found.shape, -1)), replace(found, alias="logits")]
    others += [replace(found, shape=(*found.shape[:-1], 65))] * (found.shape[-1] > 0)
    fewer = {key: info for key, info in tensors.items() if key != name}
    changed = fewer | data.draw(st.sampled_from([{}, *({name: other} for other in others)]))
    more = tensors | {{"native": "parents", "plugin": "mask.0"}[attention]: found}
    for wrong, told in ((changed, re.escape(name)), (more, "parents|mask.0")):
        with pytest.raises(BundleError, match=f"the target's plan (lacks|has|has, and should not,) (tensor )?({told})"):
            check_tensors(SPEC, wrong, attention)


@pytest.mark.parametrize(
    ("cache", "record", "told"),
    [
        ("FP8", "auto", r"has past_key\.0 as FP8, its record a cache of auto: build the bundle"),
        ("BF16", "fp8", r"has past_key\.0 as BF16, its record a cache of fp8: build the bundle"),
        ("INT8", "auto", "a cache of INT8: build it in fp16"),
    ],
)
def test_caches_of_another_type_are_refused(cache, record, told):
    fp8 = expected_tensors(SPEC, "FP8", "plugin")
    assert check_tensors(SPEC, fp8, "plugin", "fp8") == "FP8"
    found = {name: replace(info, dtype=cache) if info.dtype == "FP8" else info for name, info in fp8.items()}
    with pytest.raises(BundleError, match=told):
        check_tensors(SPEC, found, "plugin", record)


@pytest.mark.parametrize(
    ("built", "record", "told"),
    [
        (16, 0, "has, and should not, tensor page_table"),
        (0, 16, "lacks tensor page_table"),
        (16, 32, r"has page_table as .*-1, 4.* not .*-1, 2"),
    ],
)
def test_paged_caches_are_the_record_s(built, record, told):
    found = expected_tensors(SPEC, "HALF", "plugin", built)
    assert check_tensors(SPEC, found, "plugin", block_size=built) == "HALF"
    if built:
        assert (found["page_table"].shape, found["past_value.1"].shape) == ((-1, 64 // 16), (-1, 4, 16, 8))
    with pytest.raises(BundleError, match=f"the target's plan.*{told}"):
        check_tensors(SPEC, found, "plugin", block_size=record)
