"""Manifests and timing tables whose digest and hashes are right, and which no build wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbuild.runtime import Engine
from specbuild.runtime.bundle.manifest import MANIFEST, _digest
from specbuild.runtime.errors import SpecbuildError

HUGE = 10**12
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "capacity": lambda body: body["models"]["target"].update(capacity=HUGE),
    "one more row": lambda body: body["models"]["target"].update(capacity=body["models"]["target"]["capacity"] + 1),
    "vocabulary": lambda body: body["models"]["target"].update(vocab_size=10**9),
    "fewer tokens": lambda body: body["models"]["draft"].update(vocab_size=7),
    "layers": lambda body: body["models"]["target"].update(layers=10**6),
    "one layer": lambda body: body["models"]["target"].update(layers=1),
    "heads": lambda body: body["models"]["target"].update(kv_heads=3),
    "head size": lambda body: body["models"]["target"].update(head_dim=63),
    "window": lambda body: body["models"]["target"].update(windows=[7]),
    "no window": lambda body: body["models"]["target"].update(windows=[]),
    "bucket": lambda body: body.update(buckets=[1, HUGE]),
    "batch": lambda body: body.update(max_batch_size=5),
    "length": lambda body: body.update(max_seq_len=0),
    "tree": lambda body: body.update(default_tree="{layer.__class__}"),
    "large tree": lambda body: body.update(default_tree="best:64"),
    "end of text": lambda body: body.update(eos_token_ids=[4096]),
    "graph's size": lambda body: body["models"]["target"].update(graphs={"one": "target/batch1.onnx"}),
    "other graph": lambda body: body["models"]["target"]["graphs"].update({"1": "draft/batch1.onnx"}),
    "kind": lambda body: body["models"]["draft"].update(kind="eagle3", hidden=8),
    "negative": lambda body: body["files"]["tokenizer.json"].update(bytes=-1),
    "no number": lambda body: body.update(exactness_bound=float("nan")),
    "long number": lambda body: body.update(max_seq_len=10**4000),
    "tokenizer": lambda body: body.update(tokenizer="target/weights.bin"),
    "template": lambda body: body.update(chat_template="target/weights.bin"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_was_sealed_again_is_refused(bundle_copy: Path, name: str) -> None:
    file = bundle_copy / MANIFEST
    body = json.loads(file.read_text(encoding="utf-8"))
    del body["digest"]
    CHANGES[name](body)
    file.write_text(json.dumps(body | {"digest": _digest(body)}), encoding="utf-8")
    with pytest.raises(SpecbuildError) as caught:
        Engine.load(bundle_copy, threads=1)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
