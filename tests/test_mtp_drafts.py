"""A checkpoint's own MTP layer as its draft, built and run: its chains against PyTorch, and equal texts."""

from dataclasses import replace

import pytest
from mtp_checkpoints import make_mtp
from proposed_trees import NEW_TOKENS, TEXTS, check_plain, proposed_trees
from small_models import head_chain

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.frontend.checkpoint import find, load
from specbuild.builder.frontend.mtp_head import find_mtp, load_mtp
from specbuild.builder.prepare import prepare, with_own_draft
from specbuild.runtime import Bundle, Engine, SamplingParams
from specbuild.runtime.errors import CheckpointError

DEPTH = 3
FEW = {"max_batch_size": 2, "max_seq_len": 96}


@pytest.fixture(scope="module", params=["qwen3_5_text", "qwen3_next", "deepseek_v3", "glm4_moe"])
def built(request, tmp_path_factory, build_shared):
    """A checkpoint with an MTP layer, and its bundle, for which no draft was named."""
    folder = tmp_path_factory.mktemp(request.param)
    target = make_mtp(folder / "target", request.param)
    build_shared(target=str(target), output=folder / "bundle", **FEW)
    return target, folder / "bundle"


@pytest.mark.nightly(but=("qwen3_5_text",))
def test_the_layer_drafts_by_default(built):
    draft = Bundle.open(built[1]).manifest.models["draft"]
    assert (draft.kind, draft.hidden, draft.layers) == ("mtp", 64, 1)
    assert draft.inputs["hidden"] == "hidden_in"


@pytest.mark.nightly(but=("qwen3_5_text",))
def test_texts_are_plain_decodings(built):
    check_plain(built[1])


@pytest.mark.nightly(but=("qwen3_5_text",))
def test_chains_are_what_the_layer_says(built):
    target, bundle = built
    found = find(str(target))
    model = load(found, "eager")
    chain = head_chain(model, load_mtp(find_mtp(found), model), found.token_ids)
    with Engine.load(bundle, drafter="model", batch_size=2, threads=1) as engine:
        with engine.scheduler.exclusive() as loop:
            seen = proposed_trees(loop.proposer)
        params = SamplingParams(max_new_tokens=NEW_TOKENS, speculation=f"chain:{DEPTH}", ignore_eos=True)
        engine.generate([*TEXTS, [*TEXTS[2], 29]], params)
    drafted = [(text, tree.tokens[1:]) for text, tree in seen if len(tree) > 1]
    assert len(drafted) >= NEW_TOKENS
    for text, tokens in drafted[::3]:
        assert tokens == chain(text, len(tokens)), text


@pytest.mark.slow
def test_a_layer_that_agrees_has_its_drafts_accepted(tmp_path, build_shared):
    target = make_mtp(tmp_path / "target", "qwen3_5_text", agrees=True)
    int8 = {"precision": "int8", "quantize": QuantizeOptions(max_kl=1e3, calib_size=4)}
    build_shared(target=str(target), output=tmp_path / "bundle", draft="mtp", **FEW, **int8)
    params = SamplingParams(max_new_tokens=1 + 10 * (DEPTH + 1), speculation=f"chain:{DEPTH}", ignore_eos=True)
    with Engine.load(tmp_path / "bundle", drafter="model", batch_size=1, threads=1) as engine:
        result = engine.generate([TEXTS[0]], params)[0]
        assert result.token_ids == engine.generate([TEXTS[0]], replace(params, speculation="off"))[0].token_ids
    assert result.metrics.speculative_decoding.draft_acceptance_rate == 1
    assert Bundle.open(tmp_path / "bundle").manifest.models["draft"].precision == "int8"


def test_none_means_none(tmp_path):
    make_mtp(tmp_path, "qwen3_5_text")
    config = BuildConfig(str(tmp_path), tmp_path / "b", draft="none")
    assert with_own_draft(config) is config
    assert list(prepare(config).models) == ["target"]
    assert with_own_draft(replace(config, draft=None)).draft == "mtp"
    assert with_own_draft(replace(config, draft="self:int4")).draft == "self:int4"


def test_a_checkpoint_without_a_layer_is_refused(make_checkpoint, tmp_path):
    config = BuildConfig(str(make_checkpoint(tmp_path / "target")), tmp_path / "b")
    assert with_own_draft(config) is config
    with pytest.raises(CheckpointError, match="has no MTP layer"):
        prepare(replace(config, draft="mtp"))
