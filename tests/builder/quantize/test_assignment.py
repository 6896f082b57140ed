"""Which weight gets which scheme: patterns, head and embedding, and tied ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.builder.config.quantize_options import AUTO, QuantizeOptions
from specbuild.builder.config.scheme import parse
from specbuild.builder.quantize.assignment import assign, check_patterns, matches
from specbuild.builder.quantize.linears import Names
from specbuild.runtime.errors import OptionError

CPU, GPU = "onnxruntime", "tensorrt"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
LAYER = ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"]
INSIDE = [f"model.layers.{layer}.{name}" for layer in range(12) for name in LAYER]
NAMES = Names([EMBEDDING, *INSIDE, HEAD], EMBEDDING, HEAD, tied=False)
TIED = Names(NAMES.weights, EMBEDDING, HEAD, tied=True)


def schemes(precision, backend=CPU, names=NAMES, model="target", **options):
    return {n: str(s) for n, s in assign(QuantizeOptions(**options), model, precision, backend, names).items()}


CASES = [  # … → of query, output, down, head, embedding
    ("int4", CPU, NAMES, {}, "int4 int4 int4 int8 int8"),
    ("int8:static", CPU, NAMES, {}, "int8:static int8:static int8:static int8 int8"),
    # A lookup is rounded to the nearest.
    ("int8:gptq", CPU, NAMES, {}, "int8:gptq int8:gptq int8:gptq int8:gptq int8"),
    ("int8", CPU, NAMES, {"token_embedding_type": "int4:awq"}, "int8 int8 int8 int8 int4:rtn"),
    ("int8", CPU, NAMES, {"output_tensor_type": "int4"}, "int8 int8 int8 int4 int8"),
    ("int8", CPU, TIED, {"output_tensor_type": "int4:rtn"}, "int8 int8 int8 int4:rtn int4:rtn"),
    ("int8", CPU, TIED, {"output_tensor_type": "int4", "token_embedding_type": "fp32"}, "int8 int8 int8 int4 fp32"),
    # The last pattern counts.
    ("int4", CPU, NAMES, {"tensor_type": ("mlp.*=fp32", "down_proj=int8:64")}, "int4 int4 int8:64 int8 int8"),
    ("int4", CPU, NAMES, {"tensor_type": ("down_proj=int8:64", "mlp.*=fp32")}, "int4 int4 fp32 int8 int8"),
    # `auto` has only what was asked for.
    (AUTO, CPU, NAMES, {"tensor_type": ("down_proj=fp32",)}, "- - fp32 - -"),
    (AUTO, CPU, TIED, {"output_tensor_type": "int8"}, "- - - int8 int8"),
    # On a GPU embeddings stay, and heads where they would be stored twice.
    ("int4", GPU, NAMES, {}, "int4 int4 int4 int8 fp16"),
    ("int4", GPU, TIED, {}, "int4 int4 int4 fp16 fp16"),
    ("int8:static", GPU, NAMES, {}, "int8:static int8:static int8:static fp16 fp16"),
    ("int8", GPU, NAMES, {"tensor_type": ("*=int4",)}, "int4 int4 int4 int4 fp16"),
    # All of a model computes in one type.
    ("int4/bf16", GPU, NAMES, {"tensor_type": ("down_proj=int8",)}, "int4/bf16 int4/bf16 int8/bf16 int8/bf16 bf16"),
    ("bf16", GPU, NAMES, {"output_tensor_type": "int8"}, "bf16 bf16 bf16 int8/bf16 bf16"),
]


@pytest.mark.parametrize(("precision", "backend", "names", "options", "expected"), CASES)
def test_which_weight_has_which_scheme(precision, backend, names, options, expected):
    found = schemes(precision, backend, names, **options)
    for name, each in zip((*INSIDE[-3:], HEAD, EMBEDDING), expected.split(), strict=True):
        assert found.get(name, "-") == (each if each == "-" else str(parse(each, backend)))


@settings(deadline=None, derandomize=True)
@given(st.lists(st.text(alphabet="abc_01", min_size=1, max_size=4), min_size=1, max_size=5), st.integers(0, 5))
def test_a_name_fits_from_any_of_its_dots(parts, start):
    name, rest = ".".join(parts), ".".join(parts[min(start, len(parts) - 1) :])
    assert matches(rest, "draft", name)
    assert matches(f"draft:{rest}", "draft", name)
    assert not matches(f"target:{rest}", "draft", name)
    assert not matches(f"x{rest}", "draft", rest)
    assert not matches(f"{rest}.x", "draft", name)


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [("mlp.*", True), ("layers.[0-3].*", True), ("own_proj", False), ("layers.?.mlp", False), ("MLP.*", False)],
)
def test_a_pattern_is_a_shells(pattern, fits):
    assert matches(pattern, "target", "model.layers.1.mlp.down_proj") is fits


def test_an_embedding_is_looked_up():
    with pytest.raises(OptionError, match="an embedding is looked up, and has no activations: use int8 or int4"):
        schemes("int8", token_embedding_type="int8:static")
    with pytest.raises(OptionError, match="tensorrt looks up embeddings in 16 bits: drop --token-embedding-type"):
        schemes("int8", GPU, token_embedding_type="int8")
    with pytest.raises(OptionError, match="no precision 'int3'"):
        schemes("int8", output_tensor_type="int3")
    headless = Names([EMBEDDING, *INSIDE], EMBEDDING, None, tied=False)
    assert schemes("int4", names=headless)[EMBEDDING] == str(parse("int4:rtn", CPU))


def test_a_pattern_that_fits_nothing_is_refused_with_names_that_would():
    names = {"target": NAMES, "draft": TIED}
    check_patterns(QuantizeOptions(tensor_type=("down_proj=int8", "draft:lm_head=int8")), names, "onnxruntime")
    for pattern, models in (("dwn_proj", names), ("draft:down_proj", {"target": NAMES})):
        with pytest.raises(OptionError, match=f"'{pattern}' matches no weight: the target's 38 are {EMBEDDING}"):
            check_patterns(QuantizeOptions(tensor_type=("down_proj=int8", f"{pattern}=int4")), models, "onnxruntime")


@pytest.mark.parametrize(
    ("precision", "scheme", "instead"),
    [
        ("int4", "int8/bf16", "int8"),
        ("int4/bf16", "int8/fp16", "int8"),
        (AUTO, "bf16", "fp16"),
    ],
)
def test_a_weight_in_another_type_than_its_model_is_refused(precision, scheme, instead):
    for options in ({"tensor_type": (f"down_proj={scheme}",)}, {"output_tensor_type": scheme}):
        with pytest.raises(OptionError, match=f"^'{scheme}': this model computes in .*: use {instead}, or another"):
            schemes(precision, GPU, **options)
