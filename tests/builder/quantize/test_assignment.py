"""Which weight gets which scheme: patterns, head and embedding, and tied ones."""

from __future__ import annotations

from typing import Any

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


def schemes(
    precision: str, backend: str = CPU, names: Names = NAMES, model: str = "target", **options: Any
) -> dict[str, str]:
    return {n: str(s) for n, s in assign(QuantizeOptions(**options), model, precision, backend, names).items()}


def full(text: str, backend: str = CPU) -> str:
    return str(parse(text, backend))


def test_the_last_pattern_counts() -> None:
    found = schemes("int4", tensor_type=("down_proj=int8", "layers.1.mlp.down_proj=fp32", "layers.3.*=int8:64"))
    assert found["model.layers.0.mlp.down_proj"] == full("int8")
    assert found["model.layers.1.mlp.down_proj"] == "fp32"
    assert found["model.layers.3.mlp.down_proj"] == found["model.layers.3.self_attn.q_proj"] == full("int8:64")
    assert found["model.layers.0.self_attn.q_proj"] == full("int4")
    back = schemes("int4", tensor_type=("layers.1.mlp.down_proj=fp32", "down_proj=int8"))
    assert back["model.layers.1.mlp.down_proj"] == full("int8")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("mlp.*", "model.layers.1.mlp.down_proj"),
        ("layers.[0-3].*", "model.layers.3.mlp.down_proj"),
        ("*", "lm_head"),
    ],
)
def test_what_a_pattern_fits(pattern: str, name: str) -> None:
    assert matches(pattern, "target", name)
    assert matches(f"target:{pattern}", "target", name)
    assert not matches(f"draft:{pattern}", "target", name)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.text(alphabet="abc_01", min_size=1, max_size=4), min_size=1, max_size=5), st.integers(0, 5))
def test_a_name_fits_from_any_of_its_dots(parts: list[str], start: int) -> None:
    name, rest = ".".join(parts), ".".join(parts[min(start, len(parts) - 1) :])
    assert matches(rest, "draft", name)
    assert not matches(f"x{rest}", "draft", rest)
    assert not matches(f"{rest}.x", "draft", name)


def test_a_pattern_that_fits_nothing_is_refused_with_names_that_would() -> None:
    names = {"target": NAMES, "draft": TIED}
    check_patterns(QuantizeOptions(tensor_type=("down_proj=int8", "draft:lm_head=int8")), names, "onnxruntime")
    for pattern, models in (("dwn_proj", names), ("draft:down_proj", {"target": NAMES})):
        with pytest.raises(OptionError, match=f"'{pattern}' matches no weight: the target's 38 are {EMBEDDING}"):
            check_patterns(QuantizeOptions(tensor_type=("down_proj=int8", f"{pattern}=int4")), models, "onnxruntime")


@pytest.mark.parametrize("precision", ["int4", "int8:static"])
def test_narrow_and_static_leave_head_and_embedding_in_int8(precision: str) -> None:
    found = schemes(precision)
    assert {found[name] for name in INSIDE} == {full(precision)}
    assert found[HEAD] == found[EMBEDDING] == full("int8")


def test_head_and_embedding_by_themselves() -> None:
    found = schemes("int8", output_tensor_type="int4", token_embedding_type="fp32")
    assert (found[HEAD], found[EMBEDDING]) == (full("int4"), "fp32")
    assert schemes("int8", output_tensor_type="int4")[EMBEDDING] == full("int8")
    assert schemes("int8", token_embedding_type="int4")[HEAD] == full("int8")
    both = schemes("int8", tensor_type=("lm_head=fp32", "embed_tokens=fp32"), output_tensor_type="int4")
    assert (both[HEAD], both[EMBEDDING]) == (full("int4"), "fp32")


def test_a_lookup_is_rounded_to_the_nearest() -> None:
    assert schemes("int8:gptq")[EMBEDDING] == full("int8")
    assert schemes("int8:gptq")[HEAD] == full("int8:gptq")
    assert schemes("int8", token_embedding_type="int4:awq")[EMBEDDING] == full("int4:rtn")
    headless = Names([EMBEDDING, *INSIDE], EMBEDDING, None, tied=False)
    assert schemes("int4", names=headless)[EMBEDDING] == full("int4:rtn")
    with pytest.raises(OptionError, match="an embedding is looked up, and has no activations: use int8 or int4"):
        schemes("int8", token_embedding_type="int8:static")


def test_a_tied_heads_precision_is_the_embeddings_too() -> None:
    found = schemes("int8", names=TIED, output_tensor_type="int4:rtn")
    assert found[HEAD] == found[EMBEDDING] == full("int4:rtn")
    apart = schemes("int8", names=TIED, output_tensor_type="int4", token_embedding_type="int8")
    assert (apart[HEAD], apart[EMBEDDING]) == (full("int4"), full("int8"))


@pytest.mark.parametrize(
    ("precision", "names", "head"),
    [
        ("int8", NAMES, "int8"),
        ("int4", NAMES, "int8"),
        ("int8:static", NAMES, "fp16"),
        ("fp8", NAMES, "fp16"),
        ("int8", TIED, "fp16"),
        ("int4", TIED, "fp16"),
    ],
)
def test_on_gpus_embeddings_stay_and_heads_where_they_would_be_stored_twice(
    precision: str, names: Names, head: str
) -> None:
    found = schemes(precision, GPU, names)
    assert found[EMBEDDING] == "fp16"
    assert found[HEAD] == full(head, GPU)
    assert {found[name] for name in INSIDE} == {full(precision, GPU)}


def test_on_gpus_an_embeddings_precision_is_refused() -> None:
    with pytest.raises(OptionError, match="tensorrt looks up embeddings in 16 bits: drop --token-embedding-type"):
        schemes("int8", GPU, token_embedding_type="int8")
    assert schemes("int8", GPU, tensor_type=("*=int4",))[EMBEDDING] == "fp16"


def test_all_of_a_model_computes_in_one_type() -> None:
    """Scales are rounded to what is computed in, whatever the default of the head's or a pattern's scheme is."""
    found = schemes("int4/bf16", GPU, tensor_type=("down_proj=int8",))
    assert found[HEAD] == found[INSIDE[2]] == full("int8/bf16", GPU)
    assert found[INSIDE[0]] == full("int4/bf16", GPU)
    assert found[EMBEDDING] == "bf16"
    assert schemes("int4/bf16", GPU, output_tensor_type="int8")[HEAD] == full("int8/bf16", GPU)
    assert schemes("bf16", GPU, tensor_type=("down_proj=int8",))[INSIDE[2]] == full("int8/bf16", GPU)


@pytest.mark.parametrize(
    ("precision", "scheme", "instead"),
    [
        ("int4", "int8/bf16", "int8"),
        ("int4/bf16", "int8/fp16", "int8"),
        ("int8", "fp32", "fp16"),
        (AUTO, "bf16", "fp16"),
    ],
)
def test_a_weight_in_another_type_than_its_model_is_refused(precision: str, scheme: str, instead: str) -> None:
    for options in ({"tensor_type": (f"down_proj={scheme}",)}, {"output_tensor_type": scheme}):
        with pytest.raises(OptionError, match=f"^'{scheme}': this model computes in .*: use {instead}, or another"):
            schemes(precision, GPU, **options)


def test_auto_has_only_what_was_asked_for() -> None:
    assert schemes(AUTO) == {}
    assert schemes(AUTO, tensor_type=("layers.0.mlp.down_proj=fp32",)) == {INSIDE[2]: "fp32"}
    assert schemes(AUTO, names=TIED, output_tensor_type="int8") == dict.fromkeys((HEAD, EMBEDDING), full("int8"))
    assert schemes(AUTO, token_embedding_type="int4") == {EMBEDDING: full("int4:rtn")}


@pytest.mark.parametrize("pattern", ["own_proj", "mlp", "layers.1.*", "layers.?.*", "LM_HEAD"])
def test_what_a_pattern_does_not_fit(pattern: str) -> None:
    assert not matches(pattern, "target", "model.layers.11.mlp.down_proj")
    assert not matches(pattern, "target", "lm_head")


@pytest.mark.parametrize("options", [{"tensor_type": ("down_proj=int3",)}, {"output_tensor_type": "int3"}])
def test_what_is_no_precision_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="no precision 'int3'"):
        schemes("int8", **options)
