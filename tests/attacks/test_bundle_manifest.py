"""Manifests and timing tables whose digest and hashes are right, and which no build wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from campaign.bundle_copy import MANIFEST, manifest, sealed

from specbuild.runtime import Engine
from specbuild.runtime.errors import SpecbuildError

HUGE = 10**12
CHANGES: dict[str, tuple[Any, ...]] = {  # by the field: values that are wrong
    "models.target.capacity": (HUGE, 10**6 + 1),
    "models.target.vocab_size": (10**9,),
    "models.target.layers": (10**6, 1),
    "models.target.kv_heads": (3,),
    "models.target.head_dim": (63,),
    "models.target.windows": ([7], []),
    "models.target.graphs": ({"one": "target/batch1.onnx"}, {"1": "draft/batch1.onnx"}),
    "models.draft.vocab_size": (7,),
    "models.draft.kind": ("eagle3",),
    "buckets": ([1, HUGE],),
    "max_batch_size": (5,),
    "max_seq_len": (0, 10**4000),
    "default_tree": ("{layer.__class__}", "best:64"),
    "eos_token_ids": ([4096],),
    "files.tokenizer/json.bytes": (-1,),
    "exactness_bound": (float("nan"),),
    "tokenizer": ("target/weights.bin",),
    "chat_template": ("target/weights.bin",),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in CHANGES.items() for value in values])
def test_a_manifest_that_was_sealed_again_is_refused(bundle_copy: Path, field: str, value: Any) -> None:
    body = manifest(bundle_copy)
    *outer, last = (name.replace("/", ".") for name in field.split("."))
    at = body
    for name in outer:
        at = at[name]
    at[last] = value
    (bundle_copy / MANIFEST).write_text(json.dumps(sealed(body)), encoding="utf-8")
    with pytest.raises(SpecbuildError) as caught:
        Engine.load(bundle_copy, threads=1)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
