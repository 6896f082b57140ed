"""Grids of checkpoints that were quantized before: found again from the numbers, and from nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import random_model

from specbuild.builder.config.scheme import parse
from specbuild.builder.frontend.layer_by_layer import LayeredModel
from specbuild.builder.frontend.lazy_weights import Held
from specbuild.builder.quantize.calibrate import CalibrationCache
from specbuild.builder.quantize.grids import on_grid, own_grids
from specbuild.builder.quantize.linears import Names

ROWS, COLUMNS = 48, 256


def weight(kind, seed=0, size=32):
    """Numbers on a grid as others keep it, its steps and lowest numbers in 16 bits."""
    draw = torch.Generator().manual_seed(seed)
    shape = ROWS, COLUMNS // size, size
    steps = (0.01 + torch.rand(shape[:2], generator=draw)).half().float()[..., None]
    if kind == "Q8_0":
        numbers = torch.randint(-127, 128, shape, generator=draw) * steps
    elif kind == "Q4_0":
        numbers = (torch.randint(0, 16, shape, generator=draw) - 8) * steps
    elif kind == "Q4_1":
        low = (-15 * steps * torch.rand(steps.shape, generator=draw)).half().float()
        numbers = torch.randint(0, 16, shape, generator=draw) * steps + low
    else:  # GPTQ's, AWQ's
        zeros = torch.randint(0, 16, (*shape[:2], 1), generator=draw)
        numbers = (torch.randint(0, 16, shape, generator=draw) - zeros) * steps
    return numbers.reshape(ROWS, COLUMNS)


def assert_kept(restored, exact, offsets, scale=1.0):
    """Numbers are as they were, but for what two codes of 4 bits do not hold of an offset: 1/224 of a row's largest."""
    off = torch.zeros(len(exact)) if offsets is None else offsets.abs().amax(-1) / (2 * 7 * 16)
    assert ((restored - exact).abs() <= 1e-6 * (scale + exact.abs()) + 1.001 * off[:, None]).all()


def test_products_of_one_input_have_one_grid():
    int4 = parse("int4", "onnxruntime")
    both = on_grid({"a": Held(weight("Q4_0")), "b": Held(weight("Q4_1"))}, int4)
    assert both
    for name, kind in (("a", "Q4_0"), ("b", "Q4_1")):
        assert both[name].offsets is not None
        assert_kept(both[name].restored(), weight(kind), both[name].offsets)
    assert both["a"].scheme == both["b"].scheme
    assert on_grid({"a": Held(weight("Q4_0")), "b": Held(torch.randn(ROWS, COLUMNS))}, int4) is None


def test_blocks_of_one_number_or_of_few():
    """Among many rows."""
    numbers = torch.cat([weight("Q4_1", seed) for seed in range(86)])
    numbers[0], numbers[4120], numbers[2] = 0.0, 0.3, -0.7
    numbers[3, ::2], numbers[3, 1::2], numbers[4, 1:] = -0.25, 0.25, 0.5
    found = on_grid({"w": Held(numbers)}, parse("int4", "onnxruntime"))
    assert found
    assert_kept(found["w"].restored(), numbers, found["w"].offsets)


GRIDS = [  # kind, size, scheme, where its zero points lie
    ("Q4_0", 32, "int4", "middle"),
    ("Q4_1", 32, "int4", "offsets"),
    ("Q4_0", 32, "int8:128,asym", "middle"),
    ("Q8_0", 32, "int8", "middle"),
    ("GPTQ", 128, "int4:128", "zeros"),
    ("GPTQ", 64, "int4:128", "zeros"),
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(GRIDS), st.integers(0, 1 << 30), st.sampled_from([1e-6, 1.0, 1e4]))
def test_a_grid_is_kept_whatever_its_steps(grid, seed, scale):
    kind, size, scheme, place = grid
    exact, asked = weight(kind, seed, size) * scale, parse(scheme, "onnxruntime")
    found = on_grid({"w": Held(exact)}, asked)
    assert found
    each = found["w"]
    assert (each.scheme.block, each.scheme.method, each.scheme.activations) == (size, "grid", asked.activations)
    assert each.scheme.symmetric is (each.zeros is None) is (place == "middle")
    assert (each.offsets is not None) == (place == "offsets")
    assert_kept(each.restored(), exact, each.offsets, scale)


def off(numbers):
    """The last row off the grid."""
    numbers[-1, 5] += 0.004
    return numbers


def from_0(steps):
    codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(2))
    return 0.5 * (codes + 0.3 + steps)


@pytest.mark.parametrize(
    ("numbers", "scheme"),
    [
        (weight("Q8_0"), "int4"),  # of more levels than the scheme has
        (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)), "int8"),
        (weight("Q4_1"), "int8:static"),  # which has no blocks
        (off(torch.cat([weight("Q4_1", seed) for seed in range(4)])), "int4"),
    ],
    ids=["levels", "none", "no blocks", "a row off"],
)
def test_no_grid(numbers, scheme):
    assert on_grid({"w": Held(numbers)}, parse(scheme, "onnxruntime")) is None
    assert on_grid({"w": Held(from_0(8))}, parse("int4", "onnxruntime"))


def test_a_grid_is_looked_for_once_and_not_where_one_input_has_two_schemes(tmp_path):
    net = random_model("llama", num_hidden_layers=1, hidden_size=COLUMNS, intermediate_size=ROWS)
    mlp, cache = net.model.layers[0].mlp, CalibrationCache(tmp_path, "model")
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = weight("Q4_0"), weight("Q4_0", 1)
    gate, up = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up"))
    int4, int8 = (parse(kind, "onnxruntime") for kind in ("int4", "int8"))
    model, names = LayeredModel.of(net), Names.of(net)
    assert own_grids(model, names, {gate: int4, up: int8}, cache) == {}
    for _ in range(2):
        found = own_grids(model, names, {gate: int4, up: int4}, cache)
        torch.testing.assert_close(found[gate].whole().restored(), weight("Q4_0"))
        mlp.gate_proj.weight.data.normal_()  # the second time it is the cache's
