"""A bundle's draft gets the drafter of its kind, with its tokens, or one line on why those are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbuild.runtime import Bundle, Manifest, SamplingParams
from specbuild.runtime.drafting.eagle3 import EagleDrafter
from specbuild.runtime.drafting.factory import drafter_of
from specbuild.runtime.drafting.model import ModelDrafter
from specbuild.runtime.drafting.pard import PardDrafter
from specbuild.runtime.errors import BundleError

VOCAB, FILE = 12, "draft_tokens.json"
KINDS: dict[str, tuple[type[ModelDrafter], dict[str, Any]]] = {
    "model": (ModelDrafter, {}),
    "parallel": (PardDrafter, {"mask_token": 11}),
    "eagle3": (EagleDrafter, {"hidden": 8}),
}
Make = Callable[..., Bundle]


@pytest.fixture
def make(manifest_of: Callable[..., Manifest], write_bundle: Callable[..., Bundle], tmp_path: Path) -> Make:
    """`make(kind, tokens, columns)`: a bundle of 12 tokens; `tokens`: what its draft's file says, JSON or bytes."""

    def make(kind: str, tokens: Any = None, columns: int | None = None) -> Bundle:
        draft = {"kind": kind, "vocab_size": columns or VOCAB} | KINDS[kind][1]
        draft |= {} if tokens is None else {"tokens": FILE}
        content = tokens if isinstance(tokens, bytes) else json.dumps(tokens).encode()
        manifest = manifest_of(target={"vocab_size": VOCAB}, draft=draft)
        return write_bundle(tmp_path, manifest, {FILE: content} if tokens is not None else {})

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_every_kind_has_its_drafter(make: Make, hash_executor: Any, hash_model: Any, kind: str, overlap: bool) -> None:
    """And a model that drafts token by token is the only one that drafts ahead."""
    draft, target = (hash_executor(hash_model(seed)) for seed in (1, 2))
    drafter = drafter_of(make(kind), draft, target, 8, overlap)
    assert type(drafter) is KINDS[kind][0]
    assert drafter.executor is draft
    assert (drafter._thread is not None) == (overlap and kind == "model")
    drafter.close()


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_no_step_has_more_nodes_than_it_is_told(
    make: Make, hash_executor: Any, hash_model: Any, request_of: Any, chunk: int
) -> None:
    draft = hash_executor(hash_model(1))
    drafter, step, sizes = drafter_of(make("model"), draft, draft, chunk, False), draft.step, list[int]()
    draft.step = lambda inputs: (sizes.extend(len(each.tokens) for each in inputs), step(inputs))[1]
    drafter.propose([request_of([1, 2, 3, 4, 5, 6, 7], SamplingParams(speculation="chain:2"))])
    assert sizes == [*[chunk] * (7 // chunk), *[7 % chunk] * (7 % chunk > 0), 1]


def test_a_mask_is_the_record_s(make: Make, hash_executor: Any, hash_model: Any, request_of: Any) -> None:
    model = hash_model(1)
    drafter = drafter_of(make("parallel"), hash_executor(model), hash_executor(model), 8, False)
    (tree,) = drafter.propose([request_of([1, 2], SamplingParams(speculation="chain:3"))])
    assert tree.tokens[1:] == [int(model([1, 2, *[11] * masks]).argmax()) for masks in range(3)]


def test_columns_are_the_tokens_that_the_file_names(
    make: Make, hash_executor: Any, hash_model: Any, request_of: Any
) -> None:
    names, model = [3, 7, 1, 0, 2, 4, 6, 5, 11, 10, 9, 8], hash_model(1)
    for tokens in (names, list(range(VOCAB))):
        drafter = drafter_of(make("model", tokens), hash_executor(model), hash_executor(model), 8, False)
        (tree,) = drafter.propose([request_of([1, 2], SamplingParams(speculation="chain:1"))])
        assert tree.tokens[1] == tokens[int(model([1, 2]).argmax())]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_may_know_few_tokens(make: Make, hash_executor: Any, hash_model: Any, kind: str) -> None:
    executor = hash_executor(hash_model(1))
    drafter = drafter_of(make(kind, [7, 3, 11], columns=3), executor, executor, 8, False)
    assert np.array_equal(drafter._tokens, [7, 3, 11])  # type: ignore[arg-type]
    assert drafter_of(make(kind), executor, executor, 8, False)._tokens is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "tokens",
    [
        [7, 3],
        [7, 3, 1, 0],
        [],
        [7, 3, 3],
        [7, 3, 12],
        [7, 3, -1],
        [7, 3, 1.0],
        [True, False, True],
        ["7", "3", "1"],
        [[7, 3, 1]],
        [[7], [3, 1]],
        [7, 3, None],
        [7, 3, 2**63],
        [7, 3, 2**70],
        {"0": 7},
        7,
        None,
        pytest.param(b"", id="empty"),
        pytest.param(b"[7, 3, 1", id="no-json"),
        pytest.param(b"\xff\xfe[7]", id="no-text"),
    ],
)
def test_tokens_that_are_none_are_refused(
    make: Make, hash_executor: Any, hash_model: Any, kind: str, tokens: Any
) -> None:
    bundle = make(kind, b"null" if tokens is None else tokens, columns=3)
    executor = hash_executor(hash_model(1))
    with pytest.raises(BundleError) as caught:
        drafter_of(bundle, executor, executor, 8, False)
    assert str(caught.value) == f"{bundle.path(FILE)} does not name 3 of 12 tokens: build the bundle again"


def test_tokens_that_are_gone_are_refused(make: Make, hash_executor: Any, hash_model: Any) -> None:
    bundle, executor = make("model", [7, 3, 1], columns=3), hash_executor(hash_model(1))
    bundle.path(FILE).unlink()
    with pytest.raises(BundleError, match=r"draft_tokens\.json cannot be read"):
        drafter_of(bundle, executor, executor, 8, False)
