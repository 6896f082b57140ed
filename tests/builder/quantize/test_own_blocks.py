"""Precision `keep`: a bundle of a GGUF file computes with the file's own numbers, whatever types they are in."""

import numpy as np
import pytest
import torch
from tiny_gguf import write_gguf

from specbuild.builder.config.build_config import BuildConfig
from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.frontend.checkpoint import find
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.lazy_weights import of_names, skeleton
from specbuild.builder.frontend.vocabulary import reference_logits
from specbuild.builder.pipeline import build
from specbuild.builder.prepare import needs_of, prepare
from specbuild.builder.quantize.assignment import assign
from specbuild.builder.quantize.grids import own_grids
from specbuild.builder.quantize.linears import Names
from specbuild.builder.quantize.own_blocks import OwnBlocks
from specbuild.runtime import Bundle, Engine
from specbuild.runtime.errors import OptionError

TEXT = [5, 300, 17, 2000, 4, 99, 3, 1]
MIXED = {  # as llama.cpp mixes types: query and key in another than value, so that they are no one product
    "thirds": {"attn_v": "Q6_K", "attn": "Q4_K", "ffn_down": "Q5_K", "ffn_up": "Q2_K", "embd": "Q6_K", "": "Q3_K"},
    "halves": {"attn_v": "Q8_0", "attn": "Q5_0", "ffn_down": "Q4_1", "ffn_gate": "F16", "embd": "Q4_0", "": "Q5_1"},
}


@pytest.fixture(scope="module")
def wide(make_checkpoint, tmp_path_factory):
    """A checkpoint whose rows are whole blocks of 256."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    return make_checkpoint(tmp_path_factory.mktemp("wide") / "wide", **sizes)


@pytest.mark.slow
@pytest.mark.nightly(only=("halves",))
@pytest.mark.parametrize("kinds", MIXED)
def test_logits_are_those_of_the_dequantized_weights(kinds, wide, tmp_path):
    """Up to the rounding of inputs to 16 bits."""
    path = write_gguf(wide, tmp_path / "a.gguf", MIXED[kinds])
    report = build(BuildConfig(str(path), tmp_path / "b", max_batch_size=1, max_seq_len=64))
    (exact,) = reference_logits(find(str(path)), [TEXT])
    with Engine.load(tmp_path / "b", prefix_caching=False) as engine:
        got = engine.text_logits(TEXT)
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-3 * np.abs(exact).max())
    assert report["exactness"]["kl_nats_per_token"] < 1e-6
    assert report["quality"] is None
    assert Bundle.open(tmp_path / "b").manifest.precision == "keep"
    assert 4 < report["kept"]["target"]["bits_per_weight"] < 16


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_other_precisions_keep_the_blocks_that_they_can_hold(precision, wide, tmp_path):
    """Exactly; weights of one product only together, and with their scheme's rounding of inputs."""
    path = write_gguf(wide, tmp_path / "a.gguf", {"attn_v": "Q6_K", "attn": "Q4_K", "ffn_down": "Q8_0", "": "Q4_0"})
    checkpoint = find(str(path))
    net = skeleton(checkpoint.config, "eager")
    model, names = LayeredModel(net, of_names(net, checkpoint.tensors or {})), Names.of(net)
    schemes = assign(QuantizeOptions(), "target", f"{precision}:32,dynamic", "onnxruntime", names)
    found = {name: each for name, each in own_grids(model, names, schemes).items() if isinstance(each, OwnBlocks)}
    kept = {name.rpartition(".")[2] for name in found}
    assert kept >= {"o_proj", "gate_proj", "up_proj"}
    assert ("down_proj" in kept) is (precision == "int8")
    assert not {"q_proj", "k_proj", "v_proj"} & kept
    for name, each in found.items():
        assert each.scheme.activations == schemes[name].activations
        assert torch.equal(each.whole().restored(), model.weights[f"{name}.weight"].read())
        x = torch.randn(2, each.shape[1] * each.shape[2])
        steps = x.unflatten(1, (-1, 256)).abs().amax(-1, keepdim=True) / 127
        assert ((each.seen(x) - x).unflatten(1, (-1, 256)).abs() <= 0.51 * steps).all(), "inputs of 8 bits"


@pytest.mark.slow
def test_a_kept_target_may_have_a_quantized_draft(wide, tmp_path):
    """Whose blocks stay the file's, as was said before, and whose head may lack tokens."""
    path = str(write_gguf(wide, tmp_path / "a.gguf", "Q4_0"))
    asked = {"draft": path, "draft_precision": "int8", "max_seq_len": 64, "draft_vocab_size": 2000}
    config = BuildConfig(path, tmp_path / "b", precision="keep:dynamic", **asked)
    (draft,) = build(config)["quality"]["models"].values()
    assert draft["perplexity"][1] < 1e9
    for name, needs in needs_of(config, prepare(config)).items():
        assert 0.9 < (tmp_path / "b" / name / "weights.bin").stat().st_size / needs.weights < 1


def test_a_gguf_is_kept_unless_something_else_is_asked_for(wide, tmp_path):
    def config(path, **asked):
        return BuildConfig(str(path), tmp_path / "b", **asked)

    path = write_gguf(wide, tmp_path / "a.gguf", "Q8_0")
    assert (config(path).precision_of("target"), config(path).quantizes) == ("keep", False)
    assert config(path, draft=str(wide)).precision_of("draft") == "fp32"
    assert config(path, backend="onnxruntime-cuda").precision_of("target") == "keep"
    assert config(path, backend="tensorrt-rtx").precision_of("target") == "fp16"
    options = QuantizeOptions(tensor_type=("lm_head=int8",))
    assert config(path, quantize=options).precision_of("target") == "fp32"
    of_draft = QuantizeOptions(tensor_type=("draft:lm_head=int8",))
    assert config(path, draft=str(wide), quantize=of_draft).precision_of("target") == "keep"
    with pytest.raises(OptionError, match="keep is for all weights of a model"):
        config(path, precision="keep", quantize=options)
    with pytest.raises(OptionError, match=f"keep is for a GGUF file, and {wide} is none: give another --precision"):
        prepare(config(wide, precision="keep"))
