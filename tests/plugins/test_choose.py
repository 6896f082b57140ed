"""Choosing on the host: f is bit for bit the sampler's, and the choices follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import oracles
import pytest
from calls import choose, choose_struct, ints, struct, tree_arrays
from choosing import Case, check, drawn_params, rows, simple
from device import HostKernels
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import Choose, Fault, KernelLibrary
from specbuild.runtime.errors import OptionError
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.tree import Tree

BOUND = 1e-5  # of a score: two roundings more
FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)
EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=-0.2,
    logit_bias={0: 1.5, 7: -3.0, 11: 100.0},
)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 2, 13, 257, 1000, 4097, 8201]),
    nodes=st.integers(1, 8),
    dtype=st.sampled_from(FLOATS),
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
    """Every processor and cut-off, in any combination, differing in a batch."""
    params = [drawn_params(data, vocab) for _ in range(data.draw(st.integers(1, 3)))]
    with in_order(host, order):
        check(kernels, Case(seed, params, vocab, nodes, dtype, best, spread))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("best", [1, 64])
def test_many_slices(kernels: HostKernels, dtype: Any, best: int) -> None:
    params = [EVERYTHING, SamplingParams(), SamplingParams(temperature=1.0)]
    check(kernels, Case(1, params, 12_345, 3, dtype, best))


def test_processed_logits_are_bit_identical(kernels: HostKernels) -> None:
    """Without noise the scores are f itself, of every token."""
    params = SamplingParams(
        repetition_penalty=1.1, frequency_penalty=0.3, presence_penalty=0.17, logit_bias={3: 0.1, 5: -0.7}
    )
    case = Case(3, [params] * 3, 60, 12, np.float32, 60)
    check(kernels, case)
    choices, _ = choose(kernels, *case.arguments()[0], **case.arguments()[1])
    assert all(sorted(choices[b, 0].tolist()) == list(range(60)) for b in range(3))


@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_choices_are_numpys_outside_the_bound(kernels: HostKernels, temperature: float) -> None:
    """With NumPy's own noise, not the kernel's: a different choice has a gap below the bound."""
    params = [SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_p=0.9)]
    case = Case(4, params, 3000, 16, np.float32, 1)
    choices, scores = choose(kernels, *case.arguments()[0], **case.arguments()[1])
    for b, node, made, tokens, values in case.expected(None):
        assert abs(scores[b, node, 0] - values[0]) <= BOUND
        if choices[b, node, 0] != tokens[0]:
            tree, other = case.trees[b], int(choices[b, node, 0])
            position, path = case.positions[b] + tree.depths[node], tree.path(node)
            assert made.margin(case.logits[b, node], position, path, other) <= BOUND


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", FLOATS)
def test_equals_go_to_the_lowest_token(
    kernels: HostKernels, host: KernelLibrary, dtype: Any, seed: int, in_order: Callable[..., Any]
) -> None:
    logits = np.zeros((1, 3, 9000), dtype=dtype)
    logits[0, 1, [8000, 400, 8999, 4096]] = 2.0
    logits[0, 2, ::2] = -0.0
    with in_order(host, seed):
        choices, scores = simple(kernels, logits, SamplingParams(), 6)
    assert choices[0].tolist() == [[0, 1, 2, 3, 4, 5], [400, 4096, 8000, 8999, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert scores[0, 1].tolist() == [2, 2, 2, 2, 0, 0]


def test_rows_without_a_choice(kernels: HostKernels) -> None:
    nan, inf = np.nan, np.inf
    logits = rows([1, nan, 0], [-inf] * 3, [inf, 0, 0], [nan] * 3, [1, -nan, 0], [-inf, -inf, -3], [-inf, 0, -1])
    assert np.signbit(logits[0, 4, 1])
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, top_k=2, min_p=0.1)):
        choices, scores = simple(kernels, logits, params, 2)
        assert choices[0, :6].tolist() == [[-1, -1]] * 5 + [[2, -1]]
        assert np.isneginf(scores[0, :5]).all()
        assert np.isneginf(scores[0, 5, 1])
        assert np.isfinite(scores[0, 5, 0])
        assert choices[0, 6, 0] > 0


def test_a_nan_far_from_the_best_is_found(kernels: HostKernels) -> None:
    logits = np.zeros((1, 2, 10_000), dtype=np.float32)
    logits[0, 0, 9_999] = np.nan
    assert simple(kernels, logits, SamplingParams())[0].ravel().tolist() == [-1, 0]


def test_rows_are_any_nodes_of_a_larger_pool(kernels: HostKernels) -> None:
    """A draft's frontier: row_nodes points into the pool, and the depth is the node's."""
    rng = np.random.default_rng(5)
    pool = oracles.random_tree(rng, 500, 100)
    params = SamplingParams(temperature=0.9, repetition_penalty=1.5, frequency_penalty=0.5)
    nodes = ints([[0, 499, 17, 250]])
    logits = rng.normal(0, 2, (1, 4, 100)).astype(np.float32)
    tokens, parents, _ = tree_arrays([pool], 500)
    choices, _ = choose(kernels, logits, [params], [9], [50], tokens, parents, 3, row_nodes=nodes)
    made = oracles.sampler(params, 9, 100, [], [])
    for row, node in enumerate(nodes[0].tolist()):
        expected, _ = oracles.best(made, logits[0, row], 50 + pool.depths[node], pool.path(node), 3)
        assert choices[0, row].tolist() == expected


def test_rows_may_lie_apart_and_without_scores(kernels: HostKernels) -> None:
    rng = np.random.default_rng(6)
    wide = rng.normal(0, 2, (2, 3, 70)).astype(np.float32)
    wide[:, :, 61:] = np.nan  # a padded vocabulary
    tokens = np.zeros((2, 3), dtype=np.int32)
    params = choose_struct(
        kernels, wide, [SamplingParams()] * 2, [0, 0], [0, 0], tokens, None, vocab=61, scores=None, cut_offs=0
    )
    kernels.launch("choose_tokens", params)
    assert np.array_equal(params.keep["choices"][..., 0], wide[:, :, :61].argmax(axis=2))


def test_workspace_and_tickets_are_used_again(kernels: HostKernels) -> None:
    case = Case(7, [EVERYTHING, SamplingParams()], 9000, 4, np.float32, 4)
    params = choose_struct(kernels, *case.arguments()[0], **case.arguments()[1])
    kernels.launch("choose_tokens", params)
    first = params.keep["choices"].copy()
    params.keep["choices"][:] = 0
    kernels.launch("choose_tokens", struct(kernels, Choose, **params.keep))
    assert np.array_equal(params.keep["choices"], first)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"parents": ints([[-1, 2, 0], [-1, 0, 0]])}, Fault.PARENT),
        ({"parents": ints([[-1, -2, 0], [-1, 0, 0]])}, Fault.PARENT),
        ({"row_nodes": ints([[0, 3, 0], [0, 1, 2]])}, Fault.NODE),
        ({"row_nodes": ints([[0, -1, 0], [0, 1, 2]])}, Fault.NODE),
    ],
)
def test_faults_in_memory(kernels: HostKernels, change: dict[str, Any], fault: Fault) -> None:
    """A row whose node makes no sense gives −1; the others are as they would be."""
    case = Case(8, [EVERYTHING] * 2, 50, 3, np.float32, 1)
    case.trees = [Tree([0, 1, 2], [-1, 0, 0], [0, 1, 1])] * 2
    plain, more = case.arguments()
    sound, _ = choose(kernels, *plain, **more)
    plain = *plain[:5], change.get("parents", plain[5]), 1
    params = choose_struct(kernels, *plain, **more, row_nodes=change.get("row_nodes"))
    kernels.launch("choose_tokens", params)
    assert params.keep["fault"].tolist() == [fault, 0]
    assert params.keep["choices"][0, 1, 0] == -1
    assert params.keep["choices"][0, 0, 0] == sound[0, 0, 0]
    assert np.array_equal(params.keep["choices"][1], sound[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": 3}, "logits of float8 E4M3"),
        ({"batch": 0}, "batch 0"),
        ({"vocab": (1 << 19) + 1}, "a vocabulary of 524289"),
        ({"best": 65}, "the 65 best tokens"),
        ({"stride": 9}, "rows of 10 logits lie 9 apart"),
        ({"tree_nodes": 513}, "a tree of 513 nodes"),
        ({"tree_nodes": 1}, "2 rows of a tree of 1 nodes need row_nodes"),
        ({"bias_tokens": 64}, "a bias has tokens at 0x40 and values at .* needs both"),
        ({"tickets": None}, "tickets is null"),
        ({"workspace": 12}, "workspace lies at 0xc"),
    ],
)
def test_refused(kernels: HostKernels, change: dict[str, Any], message: str) -> None:
    logits, tokens = np.zeros((1, 2, 10), dtype=np.float32), np.zeros((1, 2), dtype=np.int32)
    params = choose_struct(kernels, logits, [SamplingParams()], [0], [0], tokens, None)
    for name, value in change.items():
        setattr(params, name, value)
    with pytest.raises(OptionError, match=message):
        kernels.launch("choose_tokens", params)
    assert (params.keep["choices"] == 0x5EED).all()
