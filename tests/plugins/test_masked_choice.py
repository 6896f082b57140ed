"""Choosing among the legal tokens of each node alone, on the host: the sampler's choices with the others at −∞."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import oracles
import pytest
from calls import choose, choose_struct, ints, struct, tree_arrays
from choosing import Case, MaskedSampler, check, drawn_params, masks, rows, simple
from device import HostKernels
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import Choose, KernelLibrary
from specbuild.runtime.errors import OptionError
from specbuild.runtime.sampling.sampler import SamplingParams

KINDS = ("dense", "sparse", "one", "none", "ragged end", "one word", "all")
CUT = SamplingParams(temperature=0.8, top_k=7, top_p=0.9, min_p=0.01)


def legal_tokens(rng: np.random.Generator, kind: str, vocab: int) -> Any:
    """`bool[V]`: which tokens of one node are legal."""
    legal, last = np.zeros(vocab, dtype=bool), (vocab - 1) // 32
    if kind in ("dense", "sparse"):
        legal = rng.random(vocab) < (0.9 if kind == "dense" else 0.02)
    elif kind == "one":
        legal[rng.integers(vocab)] = True
    elif kind in ("ragged end", "one word"):
        word = last if kind == "ragged end" else int(rng.integers(last + 1))
        legal[32 * word : 32 * word + 32] = True
    elif kind == "all":
        legal[:] = True
    return legal


def legal_of(seed: int, kinds: list[list[str]], vocab: int) -> Any:
    """`bool[B, N, V]` of each node's kind."""
    rng = np.random.default_rng(seed)
    return np.array([[legal_tokens(rng, kind, vocab) for kind in nodes] for nodes in kinds])


@pytest.mark.nightly
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 2, 13, 32, 257, 1000, 4097, 8192]),
    nodes=st.integers(1, 8),
    dtype=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    best=st.sampled_from([1, 1, 4, 9]),
    spread=st.sampled_from([0.0, 0.5, 4.0]),
    order=st.integers(0, 5),
    data=st.data(),
)
def test_anything(
    kernels: HostKernels,
    host: KernelLibrary,
    in_order: Callable[..., Any],
    seed: int,
    vocab: int,
    nodes: int,
    dtype: Any,
    best: int,
    spread: float,
    order: int,
    data: st.DataObject,
) -> None:
    """Every processor and cut-off, a mask of its own for every node; a sequence of full masks is as without any."""
    params = [drawn_params(data, vocab) for _ in range(2)]
    case = Case(seed, params, vocab, nodes, dtype, best, spread)
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=nodes, max_size=nodes))
    plain, more = case.arguments()
    case.legal = legal_of(seed, [kinds, ["all"] * nodes], vocab)
    with in_order(host, order):
        check(kernels, case)
        masked = choose(kernels, *plain, **more, masks=masks(case.legal))
        without = choose(kernels, *plain, **more)
    for got, expected in zip(masked, without, strict=True):
        assert got[1].tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("best", [1, 64])
def test_many_slices(kernels: HostKernels, best: int) -> None:
    case = Case(1, [CUT, SamplingParams(), SamplingParams(temperature=1.0)], 12_345, 3, np.float32, best)
    kinds = [["dense", "ragged end", "none"], ["one word", "sparse", "one"], ["sparse", "none", "ragged end"]]
    case.legal = legal_of(2, kinds, 12_345)
    check(kernels, case)


@pytest.mark.parametrize("first", [0, 32])
def test_cut_offs_count_and_weigh_the_legal_alone(kernels: HostKernels, first: int) -> None:
    """The illegal are neither among the k best, nor have they mass, nor do they set the maximum."""
    logits = rows([9] * first + [9, 2, 8, 1, 0, -1])
    legal = np.array([[[False] * first + [False, True, False, True, True, True]]])
    for params, left in (
        (SamplingParams(temperature=1.0, top_k=1), {1}),
        (SamplingParams(temperature=1.0, top_k=3), {1, 3, 4}),
        (SamplingParams(temperature=1.0, top_p=0.7), {1, 3}),
        (SamplingParams(temperature=1.0, min_p=float(np.exp(-1.5))), {1, 3}),
        (SamplingParams(temperature=1.0, min_p=1.0), {1}),
    ):
        choices, _ = simple(kernels, logits, params, 6, masks=masks(legal))
        assert set(choices[0, 0].tolist()) - {-1} == {first + token for token in left}


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0), CUT])
@pytest.mark.parametrize("vocab", [3, 33, 5000])
def test_a_node_without_a_legal_token_has_no_choice(kernels: HostKernels, params: SamplingParams, vocab: int) -> None:
    """Whether no bit is set, or those of tokens whose logits are −∞; and places past the legal tokens stay empty."""
    logits = np.random.default_rng(3).normal(0, 2, (1, 4, vocab)).astype(np.float32)
    legal = np.zeros(logits.shape, dtype=bool)
    legal[0, 1, 2], logits[0, 1, 2] = True, -np.inf
    legal[0, 2, [0, 2]] = legal[0, 3] = True
    choices, scores = simple(kernels, logits, params, 3, masks=masks(legal))
    assert choices[0, :2].tolist() == [[-1] * 3] * 2
    assert np.isneginf(scores[0, :2]).all()
    assert set(choices[0, 2].tolist()) <= {0, 2, -1}
    assert choices[0, 2, 0] >= 0
    assert choices[0, 2, 2] == -1
    assert choices[0, 3, 0] >= 0


def test_an_illegal_tokens_logit_does_not_matter(kernels: HostKernels) -> None:
    """Neither a NaN nor an infinity, nor one that a penalty or a bias makes so; a legal one is found."""
    nan, inf = np.nan, np.inf
    logits = rows([nan, 1, 0, 2], [inf, 1, 0, 2], [nan, 1, 0, 2], [inf, 1, 0, 2])
    legal = np.array([[[False, True, True, True]] * 2 + [[True] * 3 + [False]] * 2])
    for params in (
        SamplingParams(),
        SamplingParams(temperature=1.0, top_p=0.99, top_k=1),
        SamplingParams(logit_bias={0: 5}),
    ):
        choices, _ = simple(kernels, logits, params, masks=masks(legal))
        assert choices.ravel().tolist() == [3, 3, -1, -1]


def test_groups_without_a_legal_token_leave_nothing_behind(kernels: HostKernels) -> None:
    """A row whose neighbour on the same processor had better tokens, where this one has none that are legal."""
    logits = np.full((1, 2, 4096), 9, dtype=np.float32)
    legal = np.zeros(logits.shape, dtype=bool)
    legal[0, 0], legal[0, 1, [0, 4]] = True, True
    choices, _ = simple(kernels, logits, SamplingParams(), 3, masks=masks(legal))
    assert choices[0].tolist() == [[0, 1, 2], [0, 4, -1]]


def test_a_mask_is_its_rows_and_lies_without_gaps(kernels: HostKernels) -> None:
    """A draft's frontier, whose rows of logits lie apart: mask n is row n's, whichever node of the pool that is."""
    rng = np.random.default_rng(5)
    pool = oracles.random_tree(rng, 500, 100)
    params = SamplingParams(temperature=0.9, repetition_penalty=1.5, frequency_penalty=0.5, top_k=20)
    nodes = ints([[0, 499, 17, 250]])
    wide = rng.normal(0, 2, (1, 4, 130)).astype(np.float32)
    legal = rng.random((1, 4, 100)) < 0.3
    tokens, parents, _ = tree_arrays([pool], 500)
    more = {"row_nodes": nodes, "masks": masks(legal), "vocab": 100}
    choices, _ = choose(kernels, wide, [params], [9], [50], tokens, parents, 3, **more)
    for row, node in enumerate(nodes[0].tolist()):
        made = MaskedSampler(oracles.sampler(params, 9, 100, [], []), legal[0, row])
        expected, _ = oracles.best(made, wide[0, row, :100], 50 + pool.depths[node], pool.path(node), 3)
        assert choices[0, row].tolist() == expected


def test_masks_of_padding_are_not_read_and_tickets_are_used_again(kernels: HostKernels) -> None:
    case = Case(7, [CUT, SamplingParams()], 9000, 4, np.float32, 4)
    case.legal = legal_of(8, [["sparse", "none", "dense", "one"]] * 2, 9000)
    plain, more = case.arguments()
    params = choose_struct(kernels, *plain, **more)
    kernels.launch("choose_tokens", params)
    first = params.keep["choices"].copy()
    for b, tree in enumerate(case.trees):
        params.keep["masks"][b, len(tree) :] ^= np.uint32(0xFFFFFFFF)
    params.keep["choices"][:] = 0
    kernels.launch("choose_tokens", struct(kernels, Choose, **params.keep))
    assert np.array_equal(params.keep["choices"], first)


def test_masks_off_their_alignment_are_refused(kernels: HostKernels) -> None:
    logits, tokens = np.zeros((1, 2, 10), dtype=np.float32), np.zeros((1, 2), dtype=np.int32)
    params = choose_struct(kernels, logits, [SamplingParams()], [0], [0], tokens, None)
    params.masks = 10
    with pytest.raises(OptionError, match="masks lies at 0xa: align it to 4 bytes"):
        kernels.launch("choose_tokens", params)
    assert (params.keep["choices"] == 0x5EED).all()
