"""What a graph multiplies, against what its weights' shapes give."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from specbuild.builder import passes
from specbuild.builder.codegen.products import count
from specbuild.builder.config.scheme import parse
from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.export import export
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.quantize.calibrate import calibrate
from specbuild.builder.quantize.linears import Names
from specbuild.builder.quantize.rewrite import Quantize
from specbuild.measure.roofline import Attention, Experts

# Of a layer: queries and output 64 wide, keys and values 32, three products of the MLP; two norms.
LAYER = 32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 48
HEAD, NORMS = 32 * 97, 5 * 32
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


def fused(model):
    with torch.no_grad():
        for weight in model.parameters():  # equal ones would be stored once
            weight += 0.1 * torch.randn_like(weight)
    graph = export(model.eval(), probe(model.config, 64), 64, 128)
    passes.run_portable(graph)
    return graph


@pytest.mark.nightly
def test_int8_multiplies_as_much_and_reads_a_byte_and_scales(make_model):
    model = make_model(tie_word_embeddings=True)
    graph, names = fused(model), Names.of(model)
    before = count(graph, 4)
    found = calibrate(LayeredModel.of(model), dict.fromkeys(names.weights, parse("int8", "onnxruntime")), [])
    Quantize(found | {names.embedding: found[str(names.head)]}, names)(graph)
    passes.clean(graph)
    after = count(graph, 4)
    assert after.parameters == before.parameters
    weights = before.parameters
    blocks = 2 * (32 * 48 // 16)  # of 16 in rows of 48 numbers, else of 32
    blocks += (weights - 2 * 32 * 48) // 32
    assert after.bytes == weights + 2 * blocks + 4 * NORMS  # scales of 16 bits


@pytest.mark.slow
def test_experts_and_windows_apart():
    config = MixtralConfig(**SIZES, sliding_window=7, num_local_experts=4, num_experts_per_tok=2)
    found = count(fused(MixtralForCausalLM(config)), 4)
    assert found.parameters == 2 * (LAYER - 3 * 32 * 48 + 4 * 32) + HEAD  # the router multiplies for every node
    assert found.attention == (Attention(7, 4, 2 * 2 * 16, 2),)
    down, gate_up = 32 * 48, 2 * 32 * 48
    assert found.experts == (Experts(4, 2, down, 4 * down, 2), Experts(4, 2, gate_up, 4 * gate_up, 2))
    assert found.bytes == 4 * (found.parameters + NORMS)
