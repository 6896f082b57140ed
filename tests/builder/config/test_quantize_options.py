"""QuantizeOptions refuse what is out of range, and what a build would ignore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.runtime.errors import OptionError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_type": ("down_proj",)}, "--tensor-type 'down_proj': give PATTERN=PRECISION, like 'down_proj=int8'"),
        ({"tensor_type": ("=int8",)}, "--tensor-type '=int8': give PATTERN=PRECISION"),
        ({"tensor_type": ("down_proj=",)}, "--tensor-type 'down_proj=': give PATTERN=PRECISION"),
        ({"calib_size": 1}, "calib-size must be 2…4096 texts, not 1"),
        ({"calib_size": 4097}, "calib-size must be 2…4096 texts, not 4097"),
        ({"calib_seed": -1}, "calib-seed must be 0…4294967295, not -1"),
        ({"calib_seed": 1 << 32}, "calib-seed must be 0…4294967295, not 4294967296"),
        ({"max_kl": 0.0}, "max-kl must be above 0 nats a token, not 0.0"),
        ({"max_kl": float("nan")}, "max-kl must be above 0 nats a token, not nan"),
        ({"max_kl": float("inf")}, "max-kl must be above 0 nats a token, not inf"),
    ],
)
def test_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        QuantizeOptions(**options)
    assert message in str(caught.value)


def test_the_last_equals_sign_ends_a_pattern() -> None:
    options = QuantizeOptions(tensor_type=("a=b=int8",), output_tensor_type="int4")
    assert options.types == [("a=b", "int8")]
    assert options.all_types == ["int8", "int4"]


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"calibration": Path("texts.jsonl")}, "--calibration"),
        ({"calib_size": 8}, "--calib-size"),
        ({"calib_seed": 1}, "--calib-seed"),
        ({"calibration_cache": Path("cache")}, "--calibration-cache"),
        ({"max_kl": 0.1}, "--max-kl"),
        ({"tensor_type": ("down_proj=fp32",)}, "--tensor-type"),
        ({"output_tensor_type": "fp32"}, "--output-tensor-type"),
    ],
)
def test_what_would_be_ignored_is_refused(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(OptionError, match=f"nothing is quantized: drop {flag}, or give --precision int8"):
        QuantizeOptions(**options).check(quantizes=False)
    QuantizeOptions(**options).check(quantizes=True)


def test_no_options_are_ignored() -> None:
    QuantizeOptions().check(quantizes=False)


def test_the_ends_of_each_range_are_in_it() -> None:
    least = QuantizeOptions(calib_size=2, calib_seed=0, max_kl=1e-9)
    most = QuantizeOptions(calib_size=4096, calib_seed=(1 << 32) - 1, max_kl=1e9)
    assert [least.calib_size, most.calib_size] == [2, 4096]
    assert least.types == most.types == least.all_types == []


def test_what_the_target_may_cost_needs_a_target_that_is_quantized() -> None:
    """A draft's precision changes no text, so that a limit would be ignored where the draft alone is quantized."""
    with pytest.raises(OptionError, match=r"^--max-kl is of the target, which is not quantized: drop it, or give"):
        QuantizeOptions(max_kl=0.1).check(quantizes=True, target=False)
    QuantizeOptions(calib_size=8).check(quantizes=True, target=False)
