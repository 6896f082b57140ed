"""A build loads a draft that takes the target's tokens, or a head with its target, and says which tokens it drafts."""

import json

import pytest
import torch
from small_models import random_head

from specbuild.builder.build_context import BuildContext, Stages
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.frontend.checkpoint import find, load
from specbuild.builder.frontend.eagle3_head import save_head
from specbuild.builder.model_loading import columns_of, load_draft, load_target, save_tokens
from specbuild.builder.prepare import prepare

KNOWN = [0, 5, 300]


@pytest.fixture(scope="module")
def target(make_checkpoint, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("loading") / "target")


@pytest.fixture
def context(target, tmp_path):
    """`context(draft, **BuildConfig fields)`."""

    def make(draft, **fields):
        config = BuildConfig(str(target), tmp_path / "b", draft=str(draft), **fields)
        stages = Stages(lambda stage: None, lambda phase, share: None)
        return BuildContext(config, tmp_path, prepare(config), stages)

    return make


@pytest.fixture
def head(target, tmp_path):
    """`head(tokens)`: an EAGLE-3 head on disk that drafts these."""

    def make(tokens):
        (tmp_path / "head").mkdir()
        save_head(tmp_path / "head", random_head(find(str(target)).config, tokens))
        return tmp_path / "head"

    return make


@pytest.mark.parametrize(("backend", "columns"), [("onnxruntime", len(KNOWN)), ("onnxruntime-cuda", 4096)])
def test_a_trimmed_draft_has_but_its_tokens(make_checkpoint, context, tmp_path, backend, columns):
    """On a GPU its logits are by token, for kernels choose among the target's."""
    draft = make_checkpoint(tmp_path / "draft", num_hidden_layers=1)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"draft_tokens": KNOWN[::-1]}))
    work, whole = context(draft, backend=backend, precision="fp32"), load(find(str(draft)), "eager")
    loaded = load_draft(work.source)
    assert loaded.parameters == whole.num_parameters()  # as on disk
    assert torch.equal(loaded.weights["lm_head.weight"].read(), whole.get_output_embeddings().weight[KNOWN])
    assert (loaded.name, loaded.tokens, loaded.head, loaded.taps) == ("draft", KNOWN, None, None)
    assert columns_of(work, loaded) == columns
    assert save_tokens(tmp_path, loaded.tokens) == "draft_tokens.json"
    assert json.loads((tmp_path / "draft_tokens.json").read_text()) == KNOWN


def test_a_draft_may_be_the_targets_own_weights(context):
    work = context("self:int8")
    target, draft = load_target(work.source), load_draft(work.source)
    assert draft.net is not target.net
    assert target.weights.keys() == draft.weights.keys()
    assert all(torch.equal(each.read(), draft.weights[name].read()) for name, each in target.weights.items())
    assert draft.tokens is None


def test_a_head_is_read_with_its_target(context, head, tmp_path):
    """Its embedding is the target's, and counts there alone."""
    work = context(head(KNOWN))
    target = load_target(work.source)
    draft = target.head
    assert draft is not None
    found = draft.net
    assert (draft.is_head, target.is_head) == (True, False)
    assert torch.equal(found.embed_tokens.weight, target.weights["model.embed_tokens.weight"].read())
    own = [weight for name, weight in found.named_parameters() if not name.startswith("embed_tokens")]
    assert draft.parameters == sum(weight.numel() for weight in own)
    assert (draft.tokens, columns_of(work, draft), columns_of(work, target)) == (KNOWN, 3, 4096)
    assert target.taps is not None
    assert (target.taps.fuse, draft.taps) == (found.fc, None), "only the target is listened to"
