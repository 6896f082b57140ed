"""Offsets as columns of codes: what they hold and where they lie; products with sums of the inputs are the same."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specbuild.builder.config.scheme import Scheme
from specbuild.builder.quantize.numbers import Quantized
from specbuild.builder.quantize.offsets import in_columns, room, rounded

ROWS = 5


def drawn(seed: int, blocks: int, size: int, bits: int) -> Quantized:
    """A weight whose offsets are at most half a step, as those beside the nearest zero point are."""
    draw, shape = torch.Generator().manual_seed(seed), (ROWS, blocks)
    scales = 0.1 + torch.rand(shape, generator=draw)
    codes, zeros = (torch.randint(0, 1 << bits, each, generator=draw).byte() for each in ((*shape, size), shape))
    offsets = rounded(scales * (torch.rand(shape, generator=draw) - 0.5), bits)
    return Quantized(Scheme(f"int{bits}", "fp32", size, False), codes, scales, zeros, offsets=offsets)


def with_sums(x: Tensor, blocks: int, size: int) -> Tensor:
    """Inputs `[T, K]` as the graph gives them to a product."""
    sums = x.reshape(len(x), blocks, size).sum(-1)
    return torch.cat([x, *[sums] * room(blocks, size)[0]], 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 70), st.sampled_from([16, 32, 64, 128]), st.sampled_from([4, 8]))
def test_a_product_with_sums_adds_the_offsets(seed: int, blocks: int, size: int, bits: int) -> None:
    part = drawn(seed, blocks, size, bits)
    longer = in_columns(part)
    assert longer.offsets is None
    assert longer.codes.shape == (ROWS, blocks + room(blocks, size)[1], size)
    x = torch.randn(3, blocks * size, generator=torch.Generator().manual_seed(seed)).double()
    given = with_sums(x, blocks, size)
    kernel, rest = longer.restored().double().split([given.shape[1], longer.codes[0].numel() - given.shape[1]], 1)
    assert not rest.any()  # of the last block
    error = (given @ kernel.T - x @ part.restored().double().T).abs()
    assert (error <= 1e-6 * (given.abs() @ kernel.abs().T)).all()  # weights are rounded to float32


def test_halves_between_two_first_codes_are_held() -> None:
    """The second code reaches half a step of the first one on one side only."""
    steps = torch.tensor([[7.0, 0.5, 1.5, -0.5, -6.5, 6.5, 6.4375, 0.0]])
    torch.testing.assert_close(rounded(steps, 4), steps, rtol=1e-6, atol=0)
    scheme, zeros = Scheme("int4", "fp32", 32, False), torch.zeros(1, 8).byte()
    codes = in_columns(Quantized(scheme, torch.zeros(1, 8, 32).byte(), torch.ones(1, 8), zeros, offsets=steps)).codes
    flat, last = codes[0, 8:].flatten().int() - 8, (room(8, 32)[0] - 1) * 8
    assert (flat[:8] + flat[last : last + 8] / 16).tolist() == steps[0].tolist()


def test_a_weight_that_has_no_offsets_stays() -> None:
    part = Quantized(Scheme("int4", "fp32", 32), torch.zeros(1, 4, 32).byte(), torch.ones(1, 4))
    assert in_columns(part) is part
