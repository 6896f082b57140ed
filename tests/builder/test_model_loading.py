"""A build loads a draft that takes the target's tokens, or a head with its target, and says which tokens it drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import random_head

from specbuild.builder.build_state import BuildState
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.frontend.checkpoint import find, load
from specbuild.builder.frontend.eagle3_head import save_head
from specbuild.builder.model_loading import columns_of, load_model, save_tokens, tokens_of
from specbuild.builder.prepare import prepare

KNOWN = [0, 5, 300]


@pytest.fixture(scope="module")
def target(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("loading") / "target")


@pytest.fixture
def state(target: Path, tmp_path: Path) -> Callable[..., BuildState]:
    """`state(draft, **BuildConfig fields)`."""

    def make(draft: Path | str, **fields: Any) -> BuildState:
        config = BuildConfig(str(target), tmp_path / "b", draft=str(draft), **fields)
        return BuildState(config, tmp_path, lambda stage: None, lambda phase, share: None, prepare(config))

    return make


@pytest.fixture
def head(target: Path, tmp_path: Path) -> Callable[[list[int]], Path]:
    """`head(tokens)`: an EAGLE-3 head on disk that drafts these."""

    def make(tokens: list[int]) -> Path:
        (tmp_path / "head").mkdir()
        save_head(tmp_path / "head", random_head(find(str(target)).config, tokens))
        return tmp_path / "head"

    return make


@pytest.mark.parametrize(("backend", "columns"), [("onnxruntime", len(KNOWN)), ("onnxruntime-cuda", 4096)])
def test_a_trimmed_draft_has_but_its_tokens(
    make_checkpoint: Callable[..., Path],
    state: Callable[..., BuildState],
    tmp_path: Path,
    backend: str,
    columns: int,
) -> None:
    """On a GPU its logits are by token, for kernels choose among the target's."""
    draft = make_checkpoint(tmp_path / "draft", num_hidden_layers=1)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"draft_tokens": KNOWN[::-1]}))
    work, whole = state(draft, backend=backend), load(find(str(draft)), "eager")
    model, parameters = load_model(work, "draft")
    assert parameters == whole.num_parameters()  # as on disk
    assert torch.equal(model.get_output_embeddings().weight, whole.get_output_embeddings().weight[KNOWN])
    assert tokens_of(work) == KNOWN
    assert (columns_of(work, "draft"), columns_of(work, "target")) == (columns, 4096)
    assert save_tokens(work) == "draft_tokens.json"
    assert json.loads((tmp_path / "draft_tokens.json").read_text()) == KNOWN


def test_a_draft_of_all_tokens_says_nothing_of_them(
    make_checkpoint: Callable[..., Path], state: Callable[..., BuildState], tmp_path: Path
) -> None:
    work = state(make_checkpoint(tmp_path / "draft", num_hidden_layers=1))
    (target, ours), (draft, theirs) = (load_model(work, name) for name in ("target", "draft"))
    assert (ours, theirs) == (target.num_parameters(), draft.num_parameters())
    assert ours > theirs
    assert (tokens_of(work), save_tokens(work), columns_of(work, "draft")) == (None, None, 4096)
    assert not (tmp_path / "draft_tokens.json").exists()


def test_a_draft_may_be_the_targets_own_weights(state: Callable[..., BuildState]) -> None:
    work = state("self:int8")
    target, draft = load_model(work, "target")[0], load_model(work, "draft")[0]
    assert draft is not target
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), draft.parameters(), strict=True))
    assert tokens_of(work) is None


def test_a_head_is_read_with_its_target(
    state: Callable[..., BuildState], head: Callable[[list[int]], Path], tmp_path: Path
) -> None:
    """Its embedding is the target's, and counts there alone."""
    work = state(head(KNOWN))
    assert work.head is None
    model, _ = load_model(work, "target")
    found, parameters = load_model(work, "draft")
    assert found is work.head
    assert torch.equal(found.embed_tokens.weight, model.get_input_embeddings().weight)
    own = [weight for name, weight in found.named_parameters() if not name.startswith("embed_tokens")]
    assert parameters == sum(weight.numel() for weight in own)
    assert (tokens_of(work), columns_of(work, "draft")) == (KNOWN, 3)
    assert save_tokens(work) == "draft_tokens.json"
    assert work.spec("target", 4096).hidden == 32


def test_a_head_of_all_tokens_says_nothing_of_them(
    state: Callable[..., BuildState], head: Callable[[list[int]], Path]
) -> None:
    work = state(head(list(range(4096))))
    load_model(work, "target")
    assert (tokens_of(work), save_tokens(work), columns_of(work, "draft")) == (None, None, 4096)
