"""What a build may be asked for."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.builder.config.build_config import BUCKETS, BuildConfig
from specbuild.builder.config.engine_options import EngineOptions
from specbuild.runtime.errors import InputError, OptionError


def config(**fields):
    return BuildConfig(**{"target": "t", "output": Path("b")} | fields)


@pytest.mark.parametrize(("largest", "compiled"), [(1, [1]), (3, [1, 2, 3]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_batch_sizes(largest, compiled):
    assert config(max_batch_size=largest).batch_sizes == compiled


def test_the_drafts_precision_is_the_targets_unless_asked_for():
    pair = {"draft": "d", "precision": "int8"}
    assert [config(**pair).precision_of(name) for name in ("target", "draft")] == ["int8", "int8"]
    assert config(**pair, draft_precision="fp32").precision_of("draft") == "fp32"
    assert config(**pair, draft_precision="fp32").precision_of("target") == "int8"
    with pytest.raises(InputError, match="needs a draft"):
        config(draft_precision="int8")


@pytest.mark.parametrize(
    ("draft", "size", "wrong"),
    [(None, 9, "of its own"), ("none", 9, "of its own"), ("self:int4", 9, "of its own"), ("d", 0, "not 0")],
)
def test_a_drafts_vocabulary_is_a_draft_models(draft, size, wrong):
    assert config(draft="d", draft_vocab_size=9).draft_vocab_size == 9
    with pytest.raises(OptionError, match=wrong):
        config(draft=draft, draft_vocab_size=size)


@pytest.mark.parametrize("caches", [{}, {"kv_cache_dtype": "fp8"}, {"block_size": 16}])
@pytest.mark.parametrize("precisions", [{"precision": "fp32"}, {"draft": "d", "draft_precision": "fp32"}])
def test_the_plugin_computes_in_16_bits(precisions, caches):
    advice = "use fp16 or bf16" if caches else "use fp16 or bf16, or --attention native"
    with pytest.raises(OptionError, match=f"^TreeAttention computes in 16 bits: {advice}$"):
        config(backend="tensorrt", engine=EngineOptions(**caches), **precisions)


LARGEST = BUCKETS[-1]
WRONG = st.one_of(
    st.tuples(st.just("backend"), st.text("abc-")),
    st.tuples(st.sampled_from(["precision", "draft_precision"]), st.text("int84").map(lambda text: f"int3{text}")),
    st.tuples(st.just("max_seq_len"), st.integers(max_value=1)),
    st.tuples(st.just("max_batch_size"), st.integers(max_value=0) | st.integers(min_value=65)),
    st.tuples(st.just("tree"), (st.integers(max_value=0) | st.integers(LARGEST)).map("chain:{}".format)),
    st.tuples(st.just("tree"), st.text("ab1:").map("bush:{}".format)),
    st.tuples(st.just("output"), st.sampled_from([Path(), Path(".."), Path("/")])),
)


@given(WRONG)
def test_what_cannot_be_built_is_refused_by_its_value(wrong):
    field, value = wrong
    with pytest.raises(InputError) as caught:
        config(**{field: value})
    assert "\n" not in str(caught.value)
    assert str(value) in str(caught.value) or repr(value) in str(caught.value)
