"""Quantized products in QuantizeLinear and DequantizeLinear: types, what they compute, what TensorRT-RTX makes of them.

Computed in float32 by ONNX Runtime, and with the plugin in NumPy, they give what PyTorch does with the same numbers.
"""

import importlib.util
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from plugin_lowering import Session as PluginSession
from small_models import holding, reference

from specbuild.builder import passes
from specbuild.builder.check.standard_chain import graph_logits
from specbuild.builder.codegen.engine_layers import describe, in_words
from specbuild.builder.codegen.tensorrt import Engine, compile_engine, make_profiles
from specbuild.builder.config.engine_options import EngineOptions
from specbuild.builder.config.quantize_options import QuantizeOptions
from specbuild.builder.config.scheme import parse
from specbuild.builder.frontend.attention_layout import probe
from specbuild.builder.frontend.export import export
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.lazy_weights import ALL
from specbuild.builder.lower import plugin
from specbuild.builder.lower.standard import DTYPES, lower
from specbuild.builder.quantize.assignment import assign
from specbuild.builder.quantize.calibrate import calibrate
from specbuild.builder.quantize.fp8_caches import cached_logits
from specbuild.builder.quantize.fp8_caches import calibrate as calibrate_caches
from specbuild.builder.quantize.linears import Names, simulated
from specbuild.builder.quantize.numbers import Numbers
from specbuild.builder.quantize.rewrite import Quantize
from specbuild.runtime.speculation.tree import Tree

CAPACITY, BACKEND = 40, "tensorrt-rtx"
TEXTS = [[5, 17, 3, 88, 42, 9, 9, 61, 8, 70, 33, 2], [61, 4, 4, 90, 12, 7, 55]]
HELD_OUT = [11, 96, 4, 61, 5, 8, 42, 17]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64}
I8, I4, F8 = ir.DataType.INT8, ir.DataType.INT4, ir.DataType.FLOAT8E4M3FN
# precision: numbers' type, whether inputs are rounded, and whether the head (not tied to the embedding) is quantized
SCHEMES = {
    "int8": (I8, False, True),
    "int8/bf16": (I8, False, True),
    "int8:static": (I8, True, False),
    "int8:static/bf16": (I8, True, False),
    "int4:32": (I4, False, True),
    "int4:64,rtn/bf16": (I4, False, True),
    "int4:32,awq": (I4, False, True),
    "fp8": (F8, True, False),
    "fp8:tensor/bf16": (F8, True, False),
}
_PORTABLE = dict[str, ir.Model]()
needs_rtx = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx")


def quantized(model, precision, **options):
    """A model's portable graph with quantized weights, and their numbers."""
    key, names = model.config.to_json_string(), Names.of(model)  # a random model is its configuration's
    if key not in _PORTABLE:
        _PORTABLE[key] = export(model, probe(model.config, CAPACITY), CAPACITY, CAPACITY)
        passes.run_portable(_PORTABLE[key])
    graph = _PORTABLE[key].clone()
    found = calibrate(
        LayeredModel.of(model), assign(QuantizeOptions(**options), "target", precision, BACKEND, names), TEXTS
    )
    Quantize(found, names)(graph)
    passes.clean(graph)
    return graph, found


def exact(model, found):
    """PyTorch's logits of a text, with the same numbers."""
    with holding(model, found):
        return reference(model, HELD_OUT)


@pytest.mark.slow
@pytest.mark.nightly(only=[f"tied head-{precision}" for precision in SCHEMES])
@pytest.mark.parametrize("precision", SCHEMES)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied head"])
def test_logits_are_those_of_the_same_numbers(make_model, precision, tied):
    model = make_model(**SIZES, tie_word_embeddings=tied)
    graph, found = quantized(model, precision, output_tensor_type=precision)
    wanted, before = exact(model, found), reference(model, HELD_OUT)
    (got,) = graph_logits(graph, CAPACITY, [HELD_OUT])
    off = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
    moved = np.linalg.norm(before - wanted) / np.linalg.norm(wanted)
    assert off < (1e-5 if not SCHEMES[precision][1] else moved / 10)  # a last bit may turn a step of what is rounded
    assert moved > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8:static", "int4:32", "fp8"])
@pytest.mark.parametrize("fp8_caches", [False, True], ids=["own type", "fp8 caches"])
def test_logits_with_the_plugin(make_model, precision, fp8_caches):
    model = make_model(**SIZES)
    graph, found = quantized(model, precision)
    scales = calibrate_caches(LayeredModel.of(model), TEXTS) if fp8_caches else None
    lowered = plugin.lower(graph, "fp32", CAPACITY, scales)
    with simulated(LayeredModel.of(model), found) as changed:
        wanted = cached_logits(changed, [HELD_OUT], scales)[0]
    session = PluginSession(lowered)
    rows, _ = session.step([Tree.chain(HELD_OUT), Tree.chain(HELD_OUT[:2])], 0, CAPACITY)
    off, moved = (np.linalg.norm(each - wanted) / np.linalg.norm(wanted) for each in (rows, reference(model, HELD_OUT)))
    assert off < moved / 10
    assert off < 1e-5 or SCHEMES[precision][1] or fp8_caches


class Unread(Numbers):
    """Numbers of another weight that must not be read yet."""

    def __init__(self, other):
        self.scheme, self.shape, self.parts = other.scheme, other.shape, other.parts
        self.smooth, self.input_scale = other.smooth, other.input_scale

    def whole(self, rows=ALL):
        raise AssertionError("a weight is read when it is written")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int4:32", "int8", "int8:static", "fp8"])
def test_lowering_reads_no_weight(make_model, precision):
    _, found = quantized(model := make_model(**SIZES), precision)
    graph = _PORTABLE[model.config.to_json_string()].clone()
    Quantize({name: Unread(each) for name, each in found.items()}, Names.of(model))(graph)
    lowered = plugin.lower(graph, parse(precision, BACKEND).dtype, CAPACITY)
    sizes = [value.const_value.size for value in lowered.graph.initializers.values() if not lazy(value)]
    assert max(sizes) <= CAPACITY * 64


def lazy(value):
    return isinstance(value.const_value, ir.LazyTensor)


WIDE = {"hidden_size": 128, "intermediate_size": 16384, "num_hidden_layers": 1}  # 12.8 MB of weights in 16 bits


@pytest.fixture(scope="module")
def plans(make_model, tmp_path_factory):
    """A precision's engine for sm_89 and sm_120, and the bytes of its graph's weights."""
    model, folder, made = make_model(**WIDE), tmp_path_factory.mktemp("plans"), dict[str, tuple[Engine, int]]()

    def plan(precision):
        if precision not in made:
            lowered = lower(quantized(model, precision)[0], parse(precision, BACKEND).dtype, CAPACITY)
            ir.save(lowered, folder / "model.onnx")
            options = EngineOptions(arch=("89", "120"))
            engine = compile_engine(folder / "model.onnx", BACKEND, make_profiles((1, 8), 2, 0), options)
            made[precision] = engine, sum(v.const_value.nbytes for v in lowered.graph.initializers.values())
        return made[precision]

    return plan


@pytest.mark.nightly
@needs_rtx
@pytest.mark.parametrize(
    "precision", ["int8", "int8:static", "int4:128,rtn", "int4:64,rtn/bf16", "fp8", "fp8:tensor/bf16"]
)
def test_narrow_weights_make_a_narrow_plan(plans, precision):
    """On a machine without a GPU; each weight has a DEQUANTIZE, each rounded input a pair."""
    (engine, weights), (wide, wide_weights) = plans(precision), plans("fp16")
    _, rounds, head = SCHEMES.get(precision, (None, False, True))
    layers = Counter(kind for _, kind in engine.layers)
    assert (layers["QUANTIZE"], layers["DEQUANTIZE"]) == (4 * rounds, 4 + head + 4 * rounds)
    assert weights < (0.3 if "int4" in precision else 0.52) * wide_weights
    assert len(wide.plan) - len(engine.plan) > 0.8 * (wide_weights - weights)
    words = in_words(describe(engine.layers, 1))
    assert words.endswith("; 4 quantized weights, 4 quantized inputs" if rounds else "; 5 quantized weights")


@pytest.mark.parametrize("precision", SCHEMES)
def test_weights_stay_narrow(make_model, precision):
    """In both lowerings; scales are of the type that is computed in."""
    dtype, rounds, head = SCHEMES[precision]
    graph, computed = quantized(make_model(**SIZES), precision)[0], parse(precision, BACKEND).dtype
    for lowered in (lower(graph, computed, CAPACITY), plugin.lower(graph, computed, CAPACITY)):
        onnx.checker.check_model(ir.to_proto(lowered), full_check="bf16" not in precision)
        products = 8 + head * (dtype != I4)
        narrow = [node for node in lowered.graph if node.op_type == "DequantizeLinear"]
        kinds = Counter(node.inputs[0].dtype for node in narrow if node.inputs[0].is_initializer())
        assert kinds == Counter({dtype: products}) + Counter({I8: 8 + head - products})
        assert passes.census(lowered).get("QuantizeLinear", 0) == rounds * products
        assert {node.inputs[1].dtype for node in narrow} == {DTYPES[computed]}
