"""What a build may be asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbuild.builder.config.build_config import BUCKETS, BuildConfig
from specbuild.builder.config.engine_options import EngineOptions
from specbuild.runtime.errors import InputError, OptionError


def config(**fields: Any) -> BuildConfig:
    return BuildConfig(**{"target": "t", "output": Path("b")} | fields)


@pytest.mark.parametrize(
    ("largest", "compiled"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])],
)
def test_batch_sizes(largest: int, compiled: list[int]) -> None:
    assert config(max_batch_size=largest).batch_sizes == compiled


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("backend", "tpu", "onnxruntime"),
        ("precision", "int3", "fp32"),
        ("draft_precision", "int3", "fp32, int8"),
        ("max_seq_len", 1, "at least 2"),
        ("max_seq_len", 0, "at least 2"),
        ("max_seq_len", -5, "at least 2"),
        ("max_batch_size", 0, "1…64"),
        ("max_batch_size", 65, "1…64"),
        ("tree", "bush:3", "chain:K"),
        ("tree", "chain:0", "at least 1"),
        ("tree", f"chain:{BUCKETS[-1]}", f"at most {BUCKETS[-1] - 1}"),
        ("output", Path(), "name"),
        ("output", Path(".."), "name"),
        ("output", Path("/"), "name"),
    ],
)
def test_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        config(**{field: value})
    assert "\n" not in str(caught.value)
    assert str(value) in str(caught.value)


def test_the_drafts_precision_is_the_targets_unless_asked_for() -> None:
    pair = {"draft": "d", "precision": "int8"}
    assert [config(**pair).precision_of(name) for name in ("target", "draft")] == ["int8", "int8"]
    assert config(**pair, draft_precision="fp32").precision_of("draft") == "fp32"
    assert config(**pair, draft_precision="fp32").precision_of("target") == "int8"
    with pytest.raises(InputError, match="needs a draft"):
        config(draft_precision="int8")


@pytest.mark.parametrize(
    ("caches", "advice"),
    [
        ({}, "use fp16 or bf16, or --attention native"),
        ({"kv_cache_dtype": "fp8"}, "use fp16 or bf16"),
        ({"block_size": 16}, "use fp16 or bf16"),
    ],
)
@pytest.mark.parametrize("precisions", [{"precision": "fp32"}, {"draft": "d", "draft_precision": "fp32"}])
def test_the_plugin_computes_in_16_bits(precisions: dict[str, str], caches: dict[str, Any], advice: str) -> None:
    with pytest.raises(OptionError, match=f"^TreeAttention computes in 16 bits: {advice}$"):
        config(backend="tensorrt", engine=EngineOptions(**caches), **precisions)


def test_the_largest_tree_fits() -> None:
    assert config(tree=f"chain:{BUCKETS[-1] - 1}").tree == "chain:63"


def test_buckets_ascend_from_one() -> None:
    assert list(BUCKETS) == sorted(set(BUCKETS))
    assert BUCKETS[0] == 1


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        config().target = "other"  # type: ignore[misc]
