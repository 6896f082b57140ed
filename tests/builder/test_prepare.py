"""A build looks at, measures and refuses what it is made from before any weights are loaded."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from other_tokenizers import edit
from small_models import random_head
from tiny_families import tiny
from transformers import AutoModelForCausalLM

from specbuild.builder.codegen.nvrtc import Shape
from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.engine_options import EngineOptions
from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.frontend.attention_layout import Layout
from specbuild.builder.frontend.checkpoint import find
from specbuild.builder.frontend.eagle3_head import save_head
from specbuild.builder.pipeline import build
from specbuild.builder.plan import check_room
from specbuild.builder.prepare import needs_of, prepare
from specbuild.runtime.errors import OptionError

NO_HEADS = "head size 16: TreeAttention has 64, 80, 96, 128 and 256"


@pytest.fixture(scope="module")
def target(make_checkpoint, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("prepared") / "target")


@pytest.fixture(scope="module")
def draft(make_checkpoint, tmp_path_factory):
    """Of fewer positions than the target."""
    folder = tmp_path_factory.mktemp("prepared") / "draft"
    return make_checkpoint(folder, num_hidden_layers=1, num_key_value_heads=1, max_position_embeddings=96)


@pytest.fixture(scope="module")
def eagle(target, tmp_path_factory):
    """A random head."""
    folder = tmp_path_factory.mktemp("heads")
    save_head(folder, random_head(find(str(target)).config, list(range(0, 4096, 3))))
    return folder


def config(target, draft=None, **fields):
    return BuildConfig(str(target), Path("nowhere/b"), draft=draft and str(draft), **fields)


def test_a_pair_is_described(target, draft, make_checkpoint, tmp_path):
    """The bundle's size and the memory that it takes are bounds, and grow with the weights."""
    found = prepare(config(target, draft))
    assert (found.kind, found.shares_weights, found.max_seq_len) == ("model", False, 96)
    assert found.layouts == {"target": Layout.alike(2, 16, (0, 0)), "draft": Layout.alike(1, 16, (0,))}
    ours, theirs = ((folder / "model.safetensors").stat().st_size for folder in (target, draft))
    assert found.bundle_bytes > ours + theirs
    trimmed = prepare(config(target, draft, draft_vocab_size=64))
    assert found.bundle_bytes - trimmed.bundle_bytes > 4 * (4096 - 64 - 9) * trimmed.draft.config.hidden_size
    wide = prepare(config(make_checkpoint(tmp_path / "wide", hidden_size=64), draft))
    assert wide.bundle_bytes - found.bundle_bytes > (tmp_path / "wide" / "model.safetensors").stat().st_size - ours
    assert wide.memory_bytes > found.memory_bytes > ours


def test_each_kind_of_draft_has_its_name(target, draft, eagle, make_checkpoint, tmp_path):
    masked = edit(make_checkpoint(tmp_path / "masked", num_hidden_layers=1, vocab_size=4097), pard_token=4096)
    kinds = {str(draft): ("model", False), str(masked): ("parallel", False), str(eagle): ("eagle3", True)}
    for given, expected in (kinds | {"self:int8": ("model", True)}).items():
        found = prepare(config(target, given))
        assert (list(found.models), found.kind, found.shares_weights) == (["target", "draft"], *expected)
    assert list(prepare(config(target)).models) == ["target"]


def test_a_bundle_is_no_larger_than_was_said(pair, bundle):
    size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    assert size < prepare(config(pair / "target", pair / "draft")).bundle_bytes


@pytest.mark.slow
@pytest.mark.nightly(but=("int4",))
@pytest.mark.parametrize("precision", ["int4", "int4:64,sym,rtn", "int8", "int8:16,asym"])
def test_weights_take_what_was_said(precision, make_checkpoint, tmp_path):
    """Within 5 %, with a thirty-second for what lies between them."""
    wide = make_checkpoint(tmp_path / "wide", hidden_size=512, intermediate_size=1024, head_dim=64)
    asked = {"precision": precision, "max_batch_size": 1, "max_seq_len": 64, "tune": False}
    options = BuildConfig(str(wide), tmp_path / "b", quantize=QuantizeOptions(max_kl=1e3, calib_size=4), **asked)
    said = needs_of(options, prepare(options))["target"].weights
    build(options)
    assert said / 1.05 < sum(path.stat().st_size for path in (tmp_path / "b").rglob("*.bin")) < said


def test_what_a_kind_cannot_yet_is_refused_before_anything_is_loaded(target, eagle, make_checkpoint, tmp_path):
    plugin = {"backend": "tensorrt", "precision": "bf16", "engine": EngineOptions(kv_cache_dtype="fp8")}
    graphs = {"backend": "tensorrt", "engine": EngineOptions(attention="native")}
    quantized = [graphs | {"precision": "int8"}, graphs | {"precision": "fp16", "draft_precision": "int8"}]
    for wrong in (*quantized, plugin, {"draft_vocab_size": 9}):
        with pytest.raises(OptionError, match="a head is not"):
            prepare(BuildConfig(str(target), tmp_path / "bundle", draft=str(eagle), **wrong))
    sinks = make_checkpoint(tmp_path / "sinks")
    AutoModelForCausalLM.from_config(tiny("gpt_oss")).save_pretrained(sinks)
    with pytest.raises(OptionError, match="the target has attention sinks, which a GPU's attention does not have yet"):
        prepare(config(sinks, backend="onnxruntime-cuda"))


@pytest.mark.parametrize(("asked", "least"), [(97, "draft's 96"), (129, "target's 128")])
def test_a_text_is_no_longer_than_both_take(target, draft, make_checkpoint, tmp_path, asked, least):
    """Longer ones than most need are asked for."""
    assert prepare(config(target, draft, max_seq_len=96)).max_seq_len == 96
    with pytest.raises(OptionError, match=rf"^max-seq-len {asked} is beyond the {least} positions$"):
        prepare(config(target, draft, max_seq_len=asked))
    long = make_checkpoint(tmp_path / "long", max_position_embeddings=9000, num_hidden_layers=1)
    assert prepare(config(long)).max_seq_len == 4096
    assert prepare(config(long, max_seq_len=9000)).max_seq_len == 9000


def test_what_is_not_calibrated_keeps_nothing(target, tmp_path):
    """Only what depends on the layers' inputs is kept, and `auto` may choose such a precision."""
    options = QuantizeOptions(calibration_cache=tmp_path / "cache")
    with pytest.raises(OptionError, match="are not calibrated, there is nothing to keep: drop --calibration-cache"):
        prepare(config(target, precision="int8", quantize=options))
    for precision in ("int4:gptq", "int8:static", "auto"):
        prepare(config(target, precision=precision, quantize=options))
    prepare(config(target, precision="int8", quantize=replace(options, tensor_type=("lm_head=int8:gptq",))))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cuda_arch": ("80",)}, f"the target has no kernels, {NO_HEADS}: build it without --cuda-arch"),
        ({"backend": "tensorrt"}, f"the target has no plugin, {NO_HEADS}: use --attention native"),
        ({"backend": "onnxruntime-cuda"}, f"the target has no plugin, {NO_HEADS}: use --attention native"),
    ],
)
def test_heads_that_no_kernel_has_are_refused(target, fields, message):
    with pytest.raises(OptionError) as caught:
        prepare(config(target, **fields))
    assert str(caught.value) == message


def test_attention_is_compiled_for_the_type_that_it_computes_in(make_checkpoint, tmp_path):
    """A checkpoint's own type counts where float32 graphs decode; a graph has no attention beside the bundle's."""
    target = make_checkpoint(tmp_path / "target", num_hidden_layers=1, head_dim=64)
    for precision, shapes in (("fp16", [Shape(64, "F16", "F16")]), ("bf16", [Shape(64, "BF16", "BF16")]), ("fp32", [])):
        asked = {"backend": "onnxruntime-cuda", "precision": precision, "cuda_arch": ("90",)}
        assert prepare(config(target, **asked)).shapes == shapes
    native = EngineOptions(attention="native")
    assert prepare(config(target, backend="onnxruntime-cuda", precision="fp16", engine=native)).shapes == []
    assert prepare(config(target, cuda_arch=("90",))).shapes == [Shape(64, "BF16", "BF16")]
    assert prepare(config(edit(target, dtype="float16"), cuda_arch=("90",))).shapes == [Shape(64, "F16", "F16")]


def test_tensorrt_takes_heads_of_eights_in_16_bits(make_checkpoint, tmp_path):
    odd, even = (make_checkpoint(tmp_path / str(n), num_hidden_layers=1, head_dim=n) for n in (12, 24))
    with pytest.raises(OptionError, match=r"the target has heads of 12, .* takes multiples of 8: use fp32"):
        prepare(config(odd, backend="tensorrt-rtx", precision="fp16"))
    for target, backend, precision, attention in (
        (even, "tensorrt-rtx", "fp16", None),
        (odd, "tensorrt-rtx", "fp32", None),
        (odd, "onnxruntime-cuda", "fp32", None),
        (odd, "onnxruntime-cuda", "fp16", "native"),
    ):
        engine = EngineOptions(attention=attention)
        found = prepare(config(target, backend=backend, precision=precision, engine=engine))
        assert str(found.layouts["target"].caches[0].key) == target.name


def test_memory_and_room_that_this_machine_has_not_are_refused(target, monkeypatch):
    asked = config(target, precision="int4")
    found = prepare(asked)
    assert check_room(asked, found).memory == found.memory_bytes
    disk = shutil.disk_usage(Path.cwd())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=found.scratch_bytes - 1))
    with pytest.raises(
        OptionError, match=r"^the build writes .* to .*, which has .* free: .*set TMPDIR to another disk$"
    ):
        check_room(asked, found)


def test_a_control_groups_limit_counts(target, tmp_path, monkeypatch):
    """As Linux tells it in one file."""
    limit, is_file, read_text = tmp_path / "memory.max", Path.is_file, Path.read_text

    def of(path):
        return limit if path.name == limit.name else path

    monkeypatch.setattr(Path, "is_file", lambda path: is_file(of(path)))
    monkeypatch.setattr(Path, "read_text", lambda path, **given: read_text(of(path), **given))
    limit.write_text("max\n")
    asked = config(target)
    found = prepare(asked)
    assert check_room(asked, found).memory == found.memory_bytes
    limit.write_text(f"{64 << 20}\n")
    with pytest.raises(OptionError, match=r"of memory, this machine has 67 MB: build on a larger one"):
        check_room(asked, found)


def test_more_layers_take_no_more_memory_than_the_bundle_does(make_checkpoint, tmp_path):
    """However they are quantized; and what is compared lies in TMPDIR."""
    few, many = (prepare_of(make_checkpoint(tmp_path / str(n), num_hidden_layers=n, hidden_size=128)) for n in (2, 8))
    parameters = find(str(tmp_path / "8")).parameters - find(str(tmp_path / "2")).parameters
    for precision in ("fp32", "int4", "best:size"):
        assert many[precision].memory_bytes - few[precision].memory_bytes < 6 * parameters + (1 << 20)
    assert many["best:size"].scratch_bytes > many["int4"].scratch_bytes == few["int4"].scratch_bytes


def prepare_of(target):
    return {precision: prepare(config(target, precision=precision)) for precision in ("fp32", "int4", "best:size")}
