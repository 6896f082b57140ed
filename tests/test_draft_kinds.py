"""Drafts of every kind, built and run: their trees against plain PyTorch, and texts that are what they were."""

import json
import shutil
from dataclasses import replace

import onnx
import pytest
import torch
from proposed_trees import NEW_TOKENS, TEXTS, check_plain, proposed_trees
from small_models import head_chain, parallel_chain, random_head

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.engine_options import EngineOptions
from specbuild.builder.frontend.checkpoint import find, load
from specbuild.builder.frontend.eagle3_head import find_head, load_head, save_head
from specbuild.builder.pipeline import build
from specbuild.runtime import Bundle, Engine, SamplingParams
from specbuild.runtime.bundle.bundle import file_record
from specbuild.runtime.errors import BundleError

pytestmark = pytest.mark.nightly

DEPTH, MASK = 4, 4096
KINDS = ("eagle3", "parallel", "trimmed")
KNOWN = list(range(0, 4096, 3))  # tokens of the small heads


@pytest.fixture(scope="module")
def target(make_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds") / "target"
    return make_checkpoint(folder, num_hidden_layers=4, tie_word_embeddings=True, initializer_range=0.2)


@pytest.fixture(scope="module", params=KINDS)
def drafted(request, target, make_checkpoint, tmp_path_factory, build_shared):
    """A bundle with a draft of some kind, and that draft in PyTorch: the greedy chain after a text."""
    folder, kind = tmp_path_factory.mktemp(request.param), request.param
    if kind == "eagle3":
        chain = eagle(target, folder / "draft")
    else:
        fields = {"vocab_size": 4097} if kind == "parallel" else {}
        draft = make_checkpoint(folder / "draft", num_hidden_layers=1, initializer_range=0.3, **fields)
        config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
        config |= {"pard_token": MASK} if kind == "parallel" else {"draft_tokens": KNOWN}
        (draft / "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = load(find(str(draft)), "eager")
        chain = parallel_chain(model, MASK) if kind == "parallel" else trimmed(model)
    build_shared(target=str(target), output=folder / "bundle", draft=str(folder / "draft"), max_batch_size=2)
    return folder / "bundle", chain


def eagle(target, folder):
    """A random head on disk, and as it is read from there."""
    folder.mkdir()
    save_head(folder, random_head(find(str(target)).config, KNOWN))
    model, found = load(find(str(target)), "eager"), find_head(str(folder), find(str(target)))
    return head_chain(model, load_head(found, model.get_input_embeddings().weight), KNOWN)


def trimmed(model):
    """Token by token, of those that the head knows."""

    @torch.no_grad()
    def chain(text, depth):
        tokens = list(text)
        for _ in range(depth):
            tokens.append(KNOWN[int(model(torch.tensor([tokens])).logits[0, -1, KNOWN].argmax())])
        return tokens[len(text) :]

    return chain


@pytest.fixture
def proposals(drafted):
    """An engine of two slots, and what its draft proposes from now on: the text, and the tree after it."""
    with Engine.load(drafted[0], drafter="model", batch_size=2, threads=1) as engine:
        with engine.scheduler.exclusive() as loop:
            seen = proposed_trees(loop.proposer)
        yield engine, seen


def test_chains_are_what_the_draft_says(drafted, proposals):
    engine, seen = proposals
    params = SamplingParams(max_new_tokens=NEW_TOKENS, speculation=f"chain:{DEPTH}", ignore_eos=True)
    engine.generate([*TEXTS, [*TEXTS[2], 29]], params)  # the last one finds its beginning in a cache
    assert len(seen) > 2 * NEW_TOKENS / (DEPTH + 1)
    drafted_of = [(text, tree.tokens[1:]) for text, tree in seen if len(tree) > 1]
    assert len(drafted_of) >= len(seen) - 1  # a head says nothing after a single token
    for text, tokens in drafted_of[::3]:
        assert tokens == drafted[1](text, len(tokens)), text


def test_texts_are_plain_decodings(drafted):
    check_plain(drafted[0])


def test_the_manifest_says_the_kind(drafted, target):
    manifest = Bundle.open(drafted[0]).manifest
    model, draft = manifest.models["target"], manifest.models["draft"]
    assert (model.kind, model.tokens, model.mask_token, model.vocab_size) == ("model", None, None, 4096)
    assert draft.kind in ("model", "parallel", "eagle3")
    assert (model.hidden, draft.hidden) == ((32, 32) if draft.kind == "eagle3" else (0, 0))
    assert draft.mask_token == (MASK if draft.kind == "parallel" else None)
    if draft.tokens:
        assert json.loads((drafted[0] / draft.tokens).read_text(encoding="utf-8")) == KNOWN
        assert draft.vocab_size == len(KNOWN)
    else:
        assert draft.vocab_size == 4096


def test_tokens_that_are_none_are_refused(drafted, tmp_path):
    from specbuild.runtime.drafting.factory import drafter_of

    bundle = Bundle.open(drafted[0])
    if bundle.manifest.models["draft"].tokens is None:  # it knows all tokens
        assert not bundle.path("draft_tokens.json").exists()
        return
    shutil.copytree(bundle.folder, tmp_path / "b")
    file = tmp_path / "b" / "draft_tokens.json"
    for wrong in ([0, 1], [*KNOWN[:-1], 4096], [*KNOWN[:-1], KNOWN[0]], "no list"):
        file.write_text(json.dumps(wrong), encoding="utf-8")
        files = bundle.manifest.files | {file.name: file_record(file)}
        listed = Bundle(tmp_path / "b", replace(bundle.manifest, files=files))
        with pytest.raises(BundleError, match="does not name 1366 of 4096 tokens"):
            drafter_of(listed, None, None, 64, False)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["onnxruntime-cuda", "tensorrt-rtx"])
def test_heads_are_built_for_gpus(target, tmp_path, backend):
    if backend == "tensorrt-rtx":
        pytest.importorskip("tensorrt_rtx")
    eagle(target, tmp_path / "head")
    few = {"buckets": (1, 2, 4), "max_batch_size": 1, "max_seq_len": 60, "tree": "chain:3", "cuda_arch": ("none",)}
    few |= {"engine": EngineOptions(attention="native")}  # of heads of 16
    config = BuildConfig(str(target), tmp_path / "b", str(tmp_path / "head"), backend, "bf16", **few)
    report = build(config)
    manifest = Bundle.open(tmp_path / "b").manifest
    model, draft = manifest.models["target"], manifest.models["draft"]
    assert (model.hidden, draft.hidden, draft.kind, draft.vocab_size, draft.tokens) == (32, 32, "eagle3", 4096, None)
    assert (model.outputs["hidden"], draft.inputs["hidden"], draft.outputs["hidden"]) == (
        "hidden",
        "hidden_in",
        "hidden",
    )
    assert report["exactness"]["graph_logit_difference"] < 1e-3
    if backend == "onnxruntime-cuda":
        graphs = {name: onnx.load(tmp_path / "b" / name / "model.onnx", load_external_data=False).graph for name in
                  ("target", "draft")}  # fmt: skip
        states = [*graphs["target"].output[1:2], *graphs["draft"].input, *graphs["draft"].output]
        found = {value.name: value.type.tensor_type.elem_type for value in states if value.name.startswith("hidden")}
        assert found == {"hidden": onnx.TensorProto.FLOAT, "hidden_in": onnx.TensorProto.FLOAT}
