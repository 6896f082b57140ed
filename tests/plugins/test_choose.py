"""Choosing on the host: bit for bit the sampler's, among all tokens or those that are legal at each node."""

import ml_dtypes
import numpy as np
import oracles
import pytest
from calls import choose, choose_struct, ints, struct, tree_arrays
from choosing import Case, MaskedSampler, check, drawn_params, masks, rows, simple
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import Choose, Fault
from specbuild.runtime.sampling.sampler import SamplingParams
from specbuild.runtime.speculation.tree import Tree

BOUND = 1e-5  # of a score: two roundings more
FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)
KINDS = ("dense", "sparse", "one", "none", "ragged end", "one word", "all")
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


def legal_tokens(rng, kind, vocab):
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


def legal_of(seed, kinds, vocab):
    """`bool[B, N, V]` of each node's kind."""
    rng = np.random.default_rng(seed)
    return np.array([[legal_tokens(rng, kind, vocab) for kind in nodes] for nodes in kinds])


@pytest.mark.slow
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 2, 13, 32, 60, 257, 1000, 4097, 12_345]),
    nodes=st.integers(1, 8),
    dtype=st.sampled_from(FLOATS),
    best=st.sampled_from([1, 1, 4, 9, 60]),
    spread=st.sampled_from([0.0, 0.5, 4.0]),
    order=st.integers(0, 5),
    kinds=st.none() | st.lists(st.sampled_from(KINDS), min_size=8, max_size=8),
    data=st.data(),
)
def test_anything(kernels, host, in_order, vocab, nodes, order, kinds, data, **how):
    """Every processor and cut-off, in any combination, differing in a batch; a full mask is as none."""
    params = [drawn_params(data, vocab) for _ in range(2)]
    case = Case(how["seed"], params, vocab, nodes, how["dtype"], min(how["best"], vocab), how["spread"])
    with in_order(host, order):
        if kinds is None:
            check(kernels, case)
            return
        plain, more = case.arguments()
        case.legal = legal_of(how["seed"], [kinds[:nodes], ["all"] * nodes], vocab)
        check(kernels, case)
        masked = choose(kernels, *plain, **more, masks=masks(case.legal))
        without = choose(kernels, *plain, **more)
    for got, expected in zip(masked, without, strict=True):
        assert got[1].tobytes() == expected[1].tobytes()


def test_choices_are_numpys_outside_the_bound(kernels):
    """With NumPy's own noise, not the kernel's: a different choice has a gap below the bound."""
    params = [SamplingParams(temperature=0.5), SamplingParams(temperature=1.3, top_p=0.9)]
    case = Case(4, params, 3000, 16, np.float32, 1)
    choices, scores = choose(kernels, *case.arguments()[0], **case.arguments()[1])
    for b, node, made, tokens, values in case.expected(None):
        assert abs(scores[b, node, 0] - values[0]) <= BOUND
        if choices[b, node, 0] != tokens[0]:
            tree, other = case.trees[b], int(choices[b, node, 0])
            position, path = case.positions[b] + tree.depths[node], tree.path(node)
            assert made.margin(case.logits[b, node], position, path, other) <= BOUND


@pytest.mark.parametrize(("seed", "dtype"), [*enumerate(FLOATS)])
def test_equals_go_to_the_lowest_token(kernels, host, dtype, seed, in_order):
    logits = np.zeros((1, 3, 9000), dtype=dtype)
    logits[0, 1, [8000, 400, 8999, 4096]] = 2.0
    logits[0, 2, ::2] = -0.0
    with in_order(host, seed):
        choices, scores = simple(kernels, logits, SamplingParams(), 6)
    assert choices[0].tolist() == [[0, 1, 2, 3, 4, 5], [400, 4096, 8000, 8999, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert scores[0, 1].tolist() == [2, 2, 2, 2, 0, 0]


def test_rows_without_a_choice(kernels):
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
    far = np.zeros((1, 2, 10_000), dtype=np.float32)
    far[0, 0, 9_999] = nan
    assert simple(kernels, far, SamplingParams())[0].ravel().tolist() == [-1, 0]


def test_rows_may_lie_apart_and_without_scores(kernels):
    rng = np.random.default_rng(6)
    wide = rng.normal(0, 2, (2, 3, 70)).astype(np.float32)
    wide[:, :, 61:] = np.nan  # a padded vocabulary
    tokens = np.zeros((2, 3), dtype=np.int32)
    params = choose_struct(
        kernels, wide, [SamplingParams()] * 2, [0, 0], [0, 0], tokens, None, vocab=61, scores=None, cut_offs=0
    )
    kernels.launch("choose_tokens", params)
    assert np.array_equal(params.keep["choices"][..., 0], wide[:, :, :61].argmax(axis=2))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"parents": ints([[-1, 2, 0], [-1, 0, 0]])}, Fault.PARENT),
        ({"parents": ints([[-1, -2, 0], [-1, 0, 0]])}, Fault.PARENT),
        ({"row_nodes": ints([[0, 3, 0], [0, 1, 2]])}, Fault.NODE),
        ({"row_nodes": ints([[0, -1, 0], [0, 1, 2]])}, Fault.NODE),
    ],
)
def test_faults_in_memory(kernels, change, fault):
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


def test_an_illegal_tokens_logit_does_not_matter(kernels):
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


def test_groups_without_a_legal_token_leave_nothing_behind(kernels):
    """A row whose neighbour on the same processor had better tokens, where this one has none that are legal."""
    logits = np.full((1, 2, 4096), 9, dtype=np.float32)
    legal = np.zeros(logits.shape, dtype=bool)
    legal[0, 0], legal[0, 1, [0, 4]] = True, True
    choices, _ = simple(kernels, logits, SamplingParams(), 3, masks=masks(legal))
    assert choices[0].tolist() == [[0, 1, 2], [0, 4, -1]]


def test_a_mask_is_its_rows_and_lies_without_gaps(kernels):
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


def test_masks_of_padding_are_not_read_and_tickets_are_used_again(kernels):
    case = Case(7, [EVERYTHING, SamplingParams()], 9000, 4, np.float32, 4)
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
