"""The grammar of a weight's precision: every option, every refusal, and what each backend has by default."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.builder.config.scheme import ACTIVATIONS, BLOCKS, METHODS, Scheme, parse
from specbuild.runtime.bundle.backend import BACKENDS
from specbuild.runtime.errors import OptionError

CPU, GPU = "onnxruntime", "tensorrt"
OPTIONS = [*map(str, BLOCKS), "channel", "tensor", "sym", "asym", *METHODS, *ACTIVATIONS]


@pytest.mark.parametrize(
    ("text", "backend", "scheme"),
    [
        ("fp32", CPU, Scheme("fp32", "fp32")),
        ("fp32", GPU, Scheme("fp32", "fp32")),
        ("bf16", GPU, Scheme("bf16", "bf16")),
        ("fp16", "onnxruntime-cuda", Scheme("fp16", "fp16")),
        ("int8", CPU, Scheme("int8", "fp32", 32, True, "rtn", "dynamic")),
        ("int8:wide,128", CPU, Scheme("int8", "fp32", 128, True, "rtn", "wide")),
        ("int4", CPU, Scheme("int4", "fp32", 32, False, "gptq", "dynamic")),
        ("int8", GPU, Scheme("int8", "fp16", 0, True, "rtn", "weight-only")),
        ("int4", GPU, Scheme("int4", "fp16", 128, True, "gptq", "weight-only")),
        ("fp8", GPU, Scheme("fp8", "fp16", 0, True, "rtn", "static")),
        ("int8", "tensorrt-rtx", Scheme("int8", "fp16", 0, True, "rtn", "weight-only")),
    ],
)
def test_defaults_of_each_backend(text: str, backend: str, scheme: Scheme) -> None:
    assert parse(text, backend) == scheme


def test_the_first_kind_of_a_backend_is_not_quantized() -> None:
    for name, backend in BACKENDS.items():
        assert not parse(backend.precisions[0], name).quantized
        assert set(backend.dtypes) <= {"fp32", "fp16", "bf16"}


@pytest.mark.parametrize(
    ("text", "backend", "changed"),
    [
        ("int8:64", CPU, {"block": 64}),
        ("int8:16,asym", CPU, {"block": 16, "symmetric": False}),
        ("int8:gptq", CPU, {"method": "gptq"}),
        ("int8:weight-only", CPU, {"activations": "weight-only"}),
        ("int8:static", CPU, {"block": 0, "activations": "static"}),
        ("int8:static,channel,sym,rtn", CPU, {"block": 0, "activations": "static"}),
        ("int4:128,sym", CPU, {"block": 128, "symmetric": True}),
        ("int4:rtn", CPU, {"method": "rtn"}),
        ("int4:awq,weight-only", CPU, {"method": "awq", "activations": "weight-only"}),
        ("int4:gptq,asym,dynamic", CPU, {}),
        ("int4:64/bf16", GPU, {"block": 64, "dtype": "bf16"}),
        ("int4/bf16", GPU, {"dtype": "bf16"}),
        ("int4/fp16", GPU, {}),
        ("int8:channel", GPU, {}),
        ("int8:static/bf16", GPU, {"activations": "static", "dtype": "bf16"}),
        ("fp8:tensor", GPU, {"per_tensor": True}),
        ("fp8:channel", GPU, {}),
        ("fp8/bf16", GPU, {"dtype": "bf16"}),
    ],
)
def test_options(text: str, backend: str, changed: dict[str, Any]) -> None:
    default, scheme = parse(text[:4].rstrip(":/"), backend), parse(text, backend)
    names = Scheme.__dataclass_fields__
    assert {n: getattr(scheme, n) for n in names if getattr(scheme, n) != getattr(default, n)} == changed


@pytest.mark.parametrize(
    ("text", "backend", "message"),
    [
        ("int3", CPU, "backend onnxruntime has no precision 'int3': use fp32, int8, int4"),
        ("", CPU, "backend onnxruntime has no precision ''"),
        ("INT8", CPU, "no precision 'INT8'"),
        ("int8 ", CPU, "no precision 'int8 '"),
        ("fp16", CPU, "backend onnxruntime has no precision 'fp16': use fp32, int8, int4"),
        ("fp8", CPU, "backend onnxruntime has no precision 'fp8'"),
        ("int8", "onnxruntime-cuda", "backend onnxruntime-cuda has no precision 'int8': use fp16, bf16, fp32"),
        ("fp32:64", CPU, "'fp32:64': fp32 takes no options"),
        ("bf16/fp16", GPU, "'bf16/fp16': bf16 takes no options"),
        ("int8/fp16", CPU, "'int8/fp16': onnxruntime computes in fp32, not in 'fp16'"),
        ("int8/fp32", GPU, "'int8/fp32': tensorrt computes in fp16, bf16, not in 'fp32'"),
        ("int8:fast", CPU, "'int8:fast': unknown option 'fast', use a block of 128, 64, 32, 16, channel, tensor, sym"),
        ("int8:64,", CPU, "unknown option ''"),
        ("int8:-64", CPU, "unknown option '-64'"),
        ("int8:²", CPU, "unknown option '²'"),
        ("int8:" + "9" * 5000, CPU, "unknown option '9999"),
        ("int8:64,static", CPU, "static INT8 has a scale for each row, symmetric, rounded: drop 64"),
        ("int8:static,asym", CPU, "drop asym"),
        ("int8:static,gptq", GPU, "drop gptq"),
        ("int8:tensor,static", GPU, "drop tensor"),
        ("int8:static,dynamic", CPU, "dynamic contradicts an option before it: give one of them"),
        ("int4:64,sym,asym", CPU, "asym contradicts an option before it"),
        ("int4:32,64", CPU, "64 contradicts an option before it"),
        ("int4:rtn,gptq", GPU, "gptq contradicts an option before it"),
        ("fp8:tensor,channel", GPU, "channel contradicts an option before it"),
        ("int4:16", GPU, "TensorRT's INT4 has blocks of 32 columns or more"),
        ("int8/", CPU, "computes in fp32, not in ''"),
        ("fp8:64", GPU, "'fp8:64': FP8 takes channel or tensor alone"),
        ("fp8:asym", GPU, "FP8 takes channel or tensor alone"),
        ("fp8:gptq", GPU, "FP8 takes channel or tensor alone"),
        ("fp8:weight-only", GPU, "FP8 takes channel or tensor alone"),
        ("int4:channel", GPU, "gptq is for weights in blocks"),
        ("int8:awq", GPU, "awq is for weights in blocks"),
        ("int8:tensor", GPU, "only FP8 has one scale for a tensor"),
        ("int4:tensor,rtn", CPU, "only FP8 has one scale for a tensor"),
        ("int8:48", CPU, "a block has 128, 64, 32, 16 columns, not 48"),
        ("int8:256", GPU, "a block has 128, 64, 32, 16 columns, not 256"),
        ("int4:channel,rtn", CPU, "INT4 is in blocks, its activations weight-only, dynamic or wide"),
        ("int4:static", GPU, "INT4 is in blocks, its activations weight-only, dynamic or wide"),
        ("int8:channel", CPU, "INT8 for this backend is in blocks: use static for channels"),
        ("int8:dynamic", GPU, "TensorRT takes symmetric weights, with activations weight-only or static"),
        ("int4:asym", GPU, "TensorRT takes symmetric weights"),
        ("int8:64", GPU, "TensorRT's INT8 has a scale for each row: use channel"),
    ],
)
def test_refused(text: str, backend: str, message: str | None) -> None:
    if message is None:
        assert parse(text, backend).activations == "dynamic"  # the last one counts
        return
    with pytest.raises(OptionError) as caught:
        parse(text, backend)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(deadline=None, derandomize=True)
@given(
    backend=st.sampled_from([CPU, GPU, "tensorrt-rtx"]),
    kind=st.sampled_from(["int8", "int4", "fp8"]),
    options=st.lists(st.sampled_from(OPTIONS), max_size=4),
    dtype=st.sampled_from(["", "fp32", "fp16", "bf16"]),
)
def test_what_a_scheme_is_called_is_that_scheme(backend: str, kind: str, options: list[str], dtype: str) -> None:
    try:
        scheme = parse(kind + (":" if options else "") + ",".join(options) + ("/" if dtype else "") + dtype, backend)
    except OptionError:
        return
    assert parse(str(scheme), backend) == scheme
    assert (scheme.block in (0, *BLOCKS), scheme.quantized) == (True, True)


@settings(deadline=None, derandomize=True)
@given(st.text(alphabet=st.sampled_from("int48fp:,/asymgqrw6321²٣ \n\0"), max_size=20) | st.text(max_size=10))
def test_any_words_are_a_scheme_or_refused(text: str) -> None:
    for words in (text, f"int8:{text}", f"int8/{text}"):
        with suppress(OptionError):
            assert isinstance(parse(words, CPU), Scheme)


@pytest.mark.parametrize("text", ["fp32", "fp16", "bf16"])
def test_floats_are_called_by_their_kind(text: str) -> None:
    assert str(parse(text, GPU)) == text


def test_bits_and_what_needs_texts() -> None:
    assert {kind: parse(kind, GPU).bits for kind in BACKENDS[GPU].precisions} == {
        "fp16": 16, "bf16": 16, "fp32": 32, "int8": 8, "int4": 4, "fp8": 8
    }  # fmt: skip
    wanted = {"int8": False, "int8:gptq": True, "int8:static": True, "int4": True, "int4:rtn": False, "int4:awq": True}
    assert {text: parse(text, CPU).calibrated for text in wanted} == wanted
    assert parse("fp8", GPU).calibrated
