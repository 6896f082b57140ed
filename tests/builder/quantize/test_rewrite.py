"""Quantized weights in the graph: what is rewritten, how it is packed, and that it computes what was simulated."""

from functools import cache

import numpy as np
import onnx_ir as ir
import pytest
import torch
from graphs import parse as parse_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from small_models import fused, holding, random_model, random_texts
from torch import nn

from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.config.scheme import parse
from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.reference import text_logits
from specbuild.builder.lower.onnxruntime import lower
from specbuild.builder.lower.onnxruntime import pack as pack_panels
from specbuild.builder.passes import census, clean
from specbuild.builder.quantize.assignment import assign
from specbuild.builder.quantize.calibrate import calibrate
from specbuild.builder.quantize.grids import own_grids
from specbuild.builder.quantize.linears import Names
from specbuild.builder.quantize.numbers import Inputs, quantize
from specbuild.builder.quantize.rewrite import Quantize, check_products, pack
from specbuild.runtime.backends.cpu.executor import OrtExecutor
from specbuild.runtime.backends.executor import ModelSpec, StepInput
from specbuild.runtime.errors import OptionError

CAPACITY = 40
TEXTS = random_texts(6, 32)
TEXT = random_texts(1, 16, seed=9)[0]
CPU = "onnxruntime"
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
MODELS = {
    "llama": ("llama", WIDE),
    "grid": ("llama", WIDE | {"num_hidden_layers": 1}),
    "tied": ("llama", {"num_hidden_layers": 1, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}),
    "opt": ("opt", {"hidden_size": 128, "word_embed_proj_dim": 128, "num_attention_heads": 2, "num_hidden_layers": 1}),
    "olmo2": ("olmo2", {"num_hidden_layers": 1}),
}


@cache
def made(name):
    kind, fields = MODELS[name]
    model = random_model(kind, **fields)
    if name == "grid":
        for number, module in enumerate(each for each in model.modules() if isinstance(each, nn.Linear)):
            draw = torch.Generator().manual_seed(number)
            codes = torch.randint(0, 16, (*module.weight.shape[:1], module.weight.shape[1] // 32, 32), generator=draw)
            steps = 0.02 * (0.5 + torch.rand(codes.shape[:2], generator=draw)[..., None])
            module.weight.data = (steps * (codes - 7.3)).flatten(1)
    return model, fused(model, CAPACITY)


def numbers(name, precision, **options):
    model, names = made(name)[0], Names.of(made(name)[0])
    schemes = assign(QuantizeOptions(**options), "target", precision, CPU, names)
    found = dict(calibrate(LayeredModel.of(model), schemes, TEXTS))
    return found, names


def rewritten(name, found, names):
    graph = made(name)[1].clone()
    Quantize(found, names)(graph)
    clean(graph)
    return graph


def run(name, graph, path):
    """The graph's logits of a text in one step on ONNX Runtime."""
    model = made(name)[0]
    packed = graph.clone()
    pack_panels(packed)
    ir.save(lower(packed, CAPACITY), path)
    layout = probe(model.config, CAPACITY)
    spec = ModelSpec("t", **layout.spec, vocab_size=97, capacity=CAPACITY, max_nodes=16)
    executor = OrtExecutor(path, spec, 1, threads=1)
    (logits,) = executor.step([StepInput(0, 0, 0, TEXT, range(len(TEXT)), None, len(TEXT))])
    logits = logits.copy()
    executor.close()
    return logits


@settings(deadline=None, derandomize=True)
@given(arrays(np.uint8, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=st.integers(0, 15)))
def test_the_first_of_two_is_the_low_one(codes):
    even = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    packed = pack(codes, 4)
    assert packed.dtype == np.uint8
    assert (np.stack([packed & 15, packed >> 4], -1).reshape(even.shape) == even).all()
    assert pack(codes, 8) is codes


@pytest.mark.slow
def test_products_made_one_with_two_precisions_are_refused():
    found, names = numbers("llama", "int8", tensor_type=("layers.0.self_attn.k_proj=int4",))
    at = "model.layers.0.self_attn"
    for _ in range(2):
        with pytest.raises(OptionError, match=rf"^{at}.q_proj, {at}.k_proj, {at}.v_proj are one product: give"):
            rewritten("llama", found, names)
        found.pop(f"{at}.k_proj", None)  # then one is not quantized at all
    with pytest.raises(OptionError, match="are one product"):
        check_products(made("llama")[1], {f"{at}.q_proj": parse("int8", CPU)})


NORM = """g (float[1, 2, 64] x, float[64] norm, float[64, 16] q_T, float[64, 16] k_T, float[64, 16] v_T)
    => (float[1, 2, 16] a, float[1, 2, 16] b, float[1, 2, 16] c) {
    n, sum = specbuild.AddRMSNorm (x, x, norm)
    a = MatMul (READ, q_T)  b = MatMul (n, k_T)  c = MatMul (n, v_T)
}"""


@pytest.mark.parametrize(("read", "names"), [("n", ["q"]), ("n", ["q", "k", "v"]), ("sum", ["q"])])
def test_a_divisor_of_a_norm_that_others_read_too_is_a_product(read, names):
    """Query, key and value without FuseQKV, all of them or one alone divided; or what is read is the norm's sum."""
    graph = parse_graph(NORM.replace("READ", read))
    for value in list(graph.graph.inputs)[1:]:
        value.name = str(value.name).replace("_T", ".T")
        value.const_value = ir.tensor(np.ones(value.shape.numpy(), np.float32), name=value.name)
        graph.graph.inputs.remove(value)
        graph.graph.register_initializer(value)
    inputs = Inputs(torch.linspace(0.1, 9, 64), [])
    found = quantize(dict.fromkeys(names, torch.ones(16, 64)), parse("int8:static", CPU), inputs)
    Quantize(found, Names([*names], "e", None, False))(graph)
    assert census(graph)["Mul"] == len(names)
    assert (graph.graph.initializers["norm"].const_value.numpy() == 1).all()


@pytest.mark.slow(only=("int4",))
@pytest.mark.nightly(only=("int8",))
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_tied_weight_is_stored_once(tmp_path, precision):
    found, names = numbers("tied", precision)
    found[names.embedding] = found[str(names.head)]
    graph = rewritten("tied", found, names)
    stored = [value for value in graph.graph.initializers.values() if value.const_value.size >= 97 * 32]
    assert [value.shape[0] for value in stored].count(97) == 1
    assert_near("tied", graph, found, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"output_tensor_type": "int4:awq"},
        {"token_embedding_type": "int4"},
        {"output_tensor_type": "fp32", "token_embedding_type": "int8"},
        {"output_tensor_type": "int8:static", "token_embedding_type": "int8"},
        {"output_tensor_type": "int8:64", "token_embedding_type": "int8:32"},
    ],
)
def test_a_tied_weight_in_two_precisions(tmp_path, options):
    found, names = numbers("tied", "int8", **options)
    assert_near("tied", rewritten("tied", found, names), found, tmp_path)


def assert_near(name, graph, found, folder):
    """The graph computes what is simulated: as near as inputs' rounding lets it, which a last bit may turn."""
    model = made(name)[0]
    with holding(model, found):
        expected = text_logits(model, TEXT)
    gap = distance(run(name, graph, folder / "graph.onnx"), expected)
    activations = {each.scheme.activations for each in found.values()}
    rounds, twice = bool(activations - {"weight-only", "wide"}), "wide" in activations
    assert gap < (0.02 if rounds else 2e-4 if twice else 2e-5)
    assert gap < 0.5 * distance(text_logits(model, TEXT), expected)


def distance(logits, expected):
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))


@pytest.mark.nightly(only=("int8:gptq", "int4:16", "int4:128,asym", "int4:sym,rtn,weight-only"))
@pytest.mark.parametrize(
    "precision",
    [
        *("int8", "int8:16", "int8:64,asym", "int8:gptq", "int8:dynamic", "int8:weight-only", "int8:static"),
        *("int4:dynamic", "int4:16", "int4:32,asym", "int4:128,asym", "int4:64,sym", "int4:awq"),
        *("int4:weight-only", "int4:sym,rtn,weight-only", "int4:awq,weight-only"),
    ],
)
def test_the_graph_computes_what_is_simulated(tmp_path, precision):
    found, names = numbers("llama", precision)
    assert len(found) == len(names.weights)
    graph = rewritten("llama", found, names)
    assert "MatMul" not in census(graph)
    assert_near("llama", graph, found, tmp_path)


@pytest.mark.slow
@pytest.mark.nightly(only=("int4", "int8:128,dynamic"))
@pytest.mark.parametrize("precision", ["int4", "int4:dynamic", "int4:weight-only", "int8", "int8:128,dynamic"])
def test_the_graph_computes_a_checkpoint_s_own_grid(tmp_path, precision):
    """Of 4 bits with offsets, of 8 bits with zeros; products of one input made one."""
    model, names = made("grid")[0], Names.of(made("grid")[0])
    found = own_grids(LayeredModel.of(model), names, assign(QuantizeOptions(), "target", precision, CPU, names))
    assert {each.scheme.method for each in found.values()} == {"grid"}
    graph = rewritten("grid", found, names)
    counts = census(graph)
    assert counts["BlockMatMul"] == len(found) - 3  # three become one, and two
    with holding(model, found):
        gap = distance(run("grid", graph, tmp_path / "graph.onnx"), text_logits(model, TEXT))
    assert gap < (0.03 if found[str(names.head)].scheme.activations == "dynamic" else 2e-4)


@pytest.mark.slow
@pytest.mark.nightly(but=("int4-tied",))
@pytest.mark.parametrize("name", ["gpt2", "opt", "olmo2", "tied"])
@pytest.mark.parametrize("precision", ["int8", "int4", "int4:awq,weight-only", "int8:static"])
def test_other_families(tmp_path, name, precision):
    found, names = numbers(name, precision)
    assert_near(name, rewritten(name, found, names), found, tmp_path)


def test_mixed_precisions_in_one_graph(tmp_path):
    kinds = ("mlp.*=int8:static", "layers.1.self_attn.*=int8:64", "layers.0.self_attn.o_proj=fp32")
    found, names = numbers("llama", "int4:weight-only", tensor_type=kinds)
    graph = rewritten("llama", found, names)
    after = census(graph)
    assert (after["BlockMatMul"], after["ScaledMatMul"], after["MatMul"]) == (4, 4, 1)
    assert_near("llama", graph, found, tmp_path)
