"""The grammar of a weight's precision: every option, every refusal, and what each backend has by default."""

import re
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.builder.config.scheme import ACTIVATIONS, BLOCKS, METHODS, Scheme, parse
from specbuild.runtime.errors import OptionError

CPU, GPU = "onnxruntime", "tensorrt"
OPTIONS = [*map(str, BLOCKS), "channel", "tensor", "sym", "asym", *METHODS, *ACTIVATIONS]


@pytest.mark.parametrize(
    ("text", "backend", "scheme"),
    [
        ("fp32", CPU, Scheme("fp32", "fp32")),
        ("bf16", GPU, Scheme("bf16", "bf16")),
        ("fp16", "onnxruntime-cuda", Scheme("fp16", "fp16")),
        ("keep", "onnxruntime-cuda", Scheme("keep", "fp16")),
        ("int4/bf16", "onnxruntime-cuda", Scheme("int4", "bf16", 32, False, "gptq", scale_bits=16)),
        ("int8", CPU, Scheme("int8", "fp32", 32, True, "rtn", "wide", scale_bits=16)),
        ("int8:dynamic,128", CPU, Scheme("int8", "fp32", 128, True, "rtn", "dynamic", scale_bits=16)),
        ("int4", CPU, Scheme("int4", "fp32", 32, False, "gptq", "wide", scale_bits=16)),
        ("int4", GPU, Scheme("int4", "fp16", 128, True, "gptq", "weight-only")),
        ("fp8", GPU, Scheme("fp8", "fp16", 0, True, "rtn", "static")),
        ("int8", "tensorrt-rtx", Scheme("int8", "fp16", 0, True, "rtn", "weight-only")),
    ],
)
def test_defaults_of_each_backend(text, backend, scheme):
    assert parse(text, backend) == scheme


@pytest.mark.parametrize(
    ("text", "backend", "changed"),
    [
        ("int8:16,asym", CPU, {"block": 16, "symmetric": False}),
        ("int8:gptq", CPU, {"method": "gptq"}),
        ("int8:static,channel,sym,rtn", CPU, {"block": 0, "activations": "static"}),
        ("int4:128,sym", CPU, {"block": 128, "symmetric": True}),
        ("int4:awq,weight-only", CPU, {"method": "awq", "activations": "weight-only"}),
        ("int4:gptq,asym,wide", CPU, {}),
        ("int4:64/bf16", GPU, {"block": 64, "dtype": "bf16"}),
        ("int8:channel", GPU, {}),
        ("fp8:tensor", GPU, {"per_tensor": True}),
        ("fp8:channel", GPU, {}),
    ],
)
def test_options(text, backend, changed):
    default, scheme = parse(text[:4].rstrip(":/"), backend), parse(text, backend)
    names = Scheme.__dataclass_fields__
    assert {n: getattr(scheme, n) for n in names if getattr(scheme, n) != getattr(default, n)} == changed


@settings(derandomize=True)
@given(
    backend=st.sampled_from([CPU, GPU, "tensorrt-rtx"]),
    kind=st.sampled_from(["int8", "int4", "fp8"]),
    options=st.lists(st.sampled_from(OPTIONS), max_size=4),
    dtype=st.sampled_from(["", "fp32", "fp16", "bf16"]),
)
def test_what_a_scheme_is_called_is_that_scheme(backend, kind, options, dtype):
    try:
        scheme = parse(kind + (":" if options else "") + ",".join(options) + ("/" if dtype else "") + dtype, backend)
    except OptionError:
        return
    assert parse(str(scheme), backend) == scheme
    assert (scheme.block in (0, *BLOCKS), scheme.quantized) == (True, True)


@settings(derandomize=True)
@given(st.text(alphabet=st.sampled_from("int48fp:,/asymgqrw6321²٣ \n\0"), max_size=20) | st.text(max_size=10))
def test_any_words_are_a_scheme_or_refused(text):
    for words in (text, f"int8:{text}", f"int8/{text}"):
        with suppress(OptionError):
            assert isinstance(parse(words, CPU), Scheme)


NO_SCHEMES = {
    CPU: [
        *("int3", "INT8", "int8 ", "fp8", "fp32:64", "int8/fp16", "int8:64,", "int8:²", "int8:" + "9" * 50, "int8/"),
        *("int8:64,static", "int8:static,dynamic", "int4:32,64", "int4:tensor,rtn", "int8:48", "int4:channel,rtn"),
        "int8:channel",
    ],
    GPU: [
        *("bf16/fp16", "int8/fp32", "int8:static,gptq", "int4:16", "fp8:64", "int4:channel", "int8:tensor"),
        *("int4:static", "int8:dynamic", "int8:64"),
    ],
    "onnxruntime-cuda": ["int8:static", "int8:dynamic", "int4:16", "int8:channel", "keep:wide", "fp8"],
}


@pytest.mark.parametrize(("backend", "text"), [(name, text) for name, texts in NO_SCHEMES.items() for text in texts])
def test_what_is_no_scheme_is_refused_in_one_line(backend, text):
    with pytest.raises(OptionError, match=re.escape(text[:30])) as caught:
        parse(text, backend)
    assert "\n" not in str(caught.value)
