"""QuantizeOptions refuse what is out of range, and what a build would ignore."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.runtime.errors import OptionError


def test_the_last_equals_sign_ends_a_pattern():
    options = QuantizeOptions(tensor_type=("a=b=int8",), output_tensor_type="int4")
    assert options.types == [("a=b", "int8")]
    assert options.all_types == ["int8", "int4"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("calibration", Path("texts.jsonl")),
        ("calib_size", 8),
        ("calib_seed", 1),
        ("calibration_cache", Path("cache")),
        ("max_kl", 0.1),
        ("tensor_type", ("down_proj=fp32",)),
        ("output_tensor_type", "fp32"),
    ],
)
def test_what_would_be_ignored_is_refused(name, value):
    options = QuantizeOptions(**{name: value})
    with pytest.raises(OptionError, match=f"nothing is quantized: drop --{name.replace('_', '-')}, or give"):
        options.check(quantizes=False)
    options.check(quantizes=True)
    QuantizeOptions().check(quantizes=False)


def test_the_ends_of_each_range_are_in_it():
    for ends in ({"calib_size": 2, "calib_seed": 0, "max_kl": 1e-9}, {"calib_size": 4096, "calib_seed": (1 << 32) - 1}):
        QuantizeOptions(**ends)


def test_what_the_target_may_cost_needs_a_target_that_is_quantized():
    """A draft's precision changes no text, so that a limit would be ignored where the draft alone is quantized."""
    with pytest.raises(OptionError, match=r"^--max-kl is of the target, which is not quantized: drop it, or give"):
        QuantizeOptions(max_kl=0.1).check(quantizes=True, target=False)
    QuantizeOptions(calib_size=8).check(quantizes=True, target=False)


WRONG = {
    "tensor_type": st.sampled_from([("down_proj",), ("=int8",), ("down_proj=",)]),
    "calib_size": st.integers(max_value=1) | st.integers(min_value=4097),
    "calib_seed": st.integers(max_value=-1) | st.integers(min_value=1 << 32),
    "max_kl": st.floats(max_value=0.0) | st.sampled_from([float("nan"), float("inf")]),
}


@given(st.sampled_from(sorted(WRONG)).flatmap(lambda name: WRONG[name].map(lambda value: (name, value))))
def test_what_is_out_of_range_is_refused_by_its_name(wrong):
    name, value = wrong
    with pytest.raises(OptionError, match=name.replace("_", "-")) as caught:
        QuantizeOptions(**{name: value})
    assert "\n" not in str(caught.value)
