"""A model's way into the bundle: what is timed, what executors are told, and what a precision is called."""

import pytest

from specbuild.builder.build_context import BuildContext, Stages
from specbuild.builder.compiled_model import compile_draft, compile_target
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.prepare import prepare
from specbuild.builder.quantize import texts

FIELDS = {"num_hidden_layers": 2, "head_dim": 20, "max_position_embeddings": 100}
STAGES = "load", "export", "quantize", "lower"


@pytest.fixture
def context(make_checkpoint, tmp_path):
    """`context(told, **BuildConfig fields)` of a target whose heads are no whole vectors."""

    def make(told, **fields):
        target = make_checkpoint(tmp_path / "target", **FIELDS)
        config = BuildConfig(str(target), tmp_path / "b", buckets=(1, 2, 8), tree="chain:3", max_batch_size=1, **fields)
        (tmp_path / "b").mkdir()
        return BuildContext(config, tmp_path / "b", prepare(config), Stages(told.append, lambda phase, share: None))

    return make


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_export")
@pytest.mark.parametrize(("tensor_type", "precision"), [((), "fp32"), (("lm_head=int8",), "mixed")])
def test_a_model_and_what_the_report_says_of_it(context, tensor_type, precision):
    stages, options = list[str](), QuantizeOptions(tensor_type=tensor_type, calib_size=4)
    work = context(stages, **{"quantize": options} if tensor_type else {})
    target = compile_target(work, texts.read(None, work.source.target.tokenizer, 99, 4, 0) if tensor_type else None)
    model, record = target.model, target.model.record
    assert (record.layers, record.kv_heads, record.head_dim, record.capacity) == (2, 2, 20, 108)
    assert (record.precision, record.kind, record.tokens) == (precision, "model", None)
    assert target.references is None  # Hugging Face computes what the bundle is checked with, after it is made
    assert model.matched["FuseQKV"] == 2
    if not tensor_type:
        assert stages == [f"target: {stage}" for stage in ("load", "export", "lower")]
        assert (model.quantization, model.scales, model.emitted.stored) == (None, None, None)


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_export")
def test_a_draft_of_the_targets_own_weights_shares_its_tensors(context):
    """And is judged by what the target chooses."""
    told = []
    work = context(told, draft="self:int4", quantize=QuantizeOptions(calib_size=4))
    given = texts.read(None, work.source.target.tokenizer, 99, 4, 0)
    target = compile_target(work, given)
    assert target.model.quantization is not None
    assert not target.model.quantization.numbers
    draft = compile_draft(work, given, target)
    assert draft.quantization is not None
    assert draft.quantization.acceptance is not None
    assert draft.matched["Quantize"] > 0
    assert draft.record.graphs == {"1": "target/draft-model.onnx"}
    assert draft.emitted.stored is not None
    assert set(target.model.emitted.stored or ()) < set(draft.emitted.stored)
    assert told == [f"{model}: {stage}" for model in ("target", "draft") for stage in STAGES]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_export")
def test_the_best_by_size_is_the_smallest_within_the_bound(context):
    """And each precision's weights, divergence and steps are in the report."""
    work = context([], precision="best:size", quantize=QuantizeOptions(calib_size=2, max_kl=10.0))
    target = compile_target(work, texts.read(None, work.source.target.tokenizer, 99, 4, 0))
    report = target.model.quantization.to_dict()
    rows = {row["precision"]: row for row in report["compared"]["precisions"]}
    assert set(rows) == {"int4", "int8", "fp32"}
    assert rows["int4"]["bytes"] < rows["int8"]["bytes"] < rows["fp32"]["bytes"]
    assert report["compared"]["chosen"] == "int4"
    assert report["weight_bytes"] == rows["int4"]["bytes"]
    assert rows["fp32"]["kl"]["texts"] == 0 < rows["int8"]["kl"]["texts"]
    assert all(milliseconds > 0 for row in rows.values() for milliseconds in row["steps"].values())
