"""TreeAttention's own source, run on the host, against NumPy in float64."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from attention_oracle import oracle, random_case, run
from device import GPU, HostKernels
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import Attention, Dtype, Fault

BOUNDS = {Dtype.F16: 6e-4, Dtype.BF16: 4e-3}  # of ‖out − ref‖ / ‖ref‖


@pytest.fixture(scope="session")
def bulk(compile_host):
    """The kernels as compute capability 9.0 and later run them: rows come by bulk copies."""
    return HostKernels(compile_host("-DSPECBUILD_HOST_BULK"))


@pytest.fixture(scope="session", params=["host", pytest.param("bulk", marks=pytest.mark.soak), *GPU])
def library(request):
    """Either way of copying, and a GPU where there is one."""
    found = request.getfixturevalue("bulk" if request.param == "bulk" else f"{request.param}_kernels")
    return found


def compare(library, case, workspace=None):
    """The output is near the oracle's, the new rows too, and not a byte of the rest of the caches has changed."""
    expected, *caches = oracle(case)
    output, keys, values, faults = run(library, case, workspace=workspace)
    assert not faults.any()
    real = np.arange(case.query.shape[1]) < np.array([[case.real(b)] for b in range(case.batch)])
    assert not output[~real].any()
    size = np.linalg.norm(expected[real])
    assert np.linalg.norm(output[real].astype(np.float64) - expected[real]) <= BOUNDS[case.dtype] * max(size, 1e-9)
    for new, old, wanted in zip((keys, values), (case.key_cache, case.value_cache), caches, strict=True):
        fresh = np.zeros((case.batch, wanted.shape[2]), dtype=bool)
        for b in range(case.batch):
            start = int(case.cache_len[b]) + (0 if case.tree_offset is None else int(case.tree_offset[b]))
            fresh[b, start : start + case.real(b)] = True
        rows, before = new.swapaxes(1, 2), case.linear(old).swapaxes(1, 2)
        assert rows[~fresh].tobytes() == before[~fresh].tobytes()
        got, want = rows[fresh].astype(np.float64), wanted.swapaxes(1, 2)[fresh].astype(np.float64)
        step = 0.07 if case.cache_dtype == Dtype.E4M3 else 0.01  # one step of the narrow type
        assert np.abs(got - want).max(initial=0) <= step * np.abs(want).max(initial=1)
        assert (got != want).sum() <= max(3, 0.01 * want.size)  # of few rows, a few


SIZES, NODES = [64, 80, 96, 128, 256], [1, 9, 20, 40]
TYPES = [(Dtype.F16,) * 2, (Dtype.BF16,) * 2, (Dtype.F16, Dtype.E4M3), (Dtype.BF16, Dtype.E4M3)]
FIRST = [f"host-dtypes{t}-{size}-{2 * NODES[(t + s) % 4]}rows" for t in range(4) for s, size in enumerate(SIZES)]


@pytest.mark.slow(but=("host-dtypes0-64-2rows", "host-dtypes3-96-18rows"))
@pytest.mark.nightly(but=FIRST)
@pytest.mark.parametrize("nodes", NODES, ids=lambda n: f"{2 * n}rows")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtypes", TYPES)
def test_every_kernel(library, nodes, size, dtypes):
    compare(
        library, random_case(size + nodes, nodes=nodes, size=size, dtype=dtypes[0], cache_dtype=dtypes[1], splits=2)
    )


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("cache", [Dtype.BF16, Dtype.E4M3])
def test_no_matrix_is_read_with_bank_conflicts(host_kernels, size, cache):
    """In shared memory a row's place is its stride's alone, whoever has copied it there."""
    conflicts = ctypes.CDLL(str(host_kernels.library.path)).specbuild_host_conflicts
    conflicts.restype = ctypes.c_uint64
    for nodes in (1, 9, 20):  # the kernels of 16, 32 and 64 query rows
        conflicts()
        run(host_kernels, random_case(size, nodes=nodes, size=size, cache_dtype=cache))
        assert conflicts() == 0


@pytest.mark.slow
@settings(max_examples=80)
@example(
    seed=8834571, batch=3, nodes=3, heads=(1, 1), context=3, tree=False, offset=10, rotary=64, ragged=True, norm=True,
    sinks=False, window=0, softcap=0.0, splits=1, page_rows=0, dtypes=(Dtype.F16, None),
)  # fmt: skip
@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 4),
    nodes=st.integers(1, 24),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 2), (8, 1)]),
    context=st.integers(0, 300),
    tree=st.booleans(),
    offset=st.integers(0, 12),
    rotary=st.sampled_from([0, 16, 48, 64]),
    ragged=st.booleans(),
    norm=st.booleans(),
    sinks=st.booleans(),
    window=st.sampled_from([0, 0, 1, 3, 17, 100]),
    softcap=st.sampled_from([0.0, 0.0, 3.0]),
    splits=st.sampled_from([1, 2, 3, 5, 64]),
    page_rows=st.sampled_from([0, 0, 8, 16]),
    dtypes=st.sampled_from([(Dtype.BF16, None), (Dtype.F16, None), (Dtype.F16, Dtype.E4M3)]),
)
def test_anything(kernels, heads, dtypes, page_rows, **arguments):
    case = random_case(heads=heads[0], kv_heads=heads[1], dtype=dtypes[0], cache_dtype=dtypes[1], **arguments)
    compare(kernels, case.paged(page_rows, arguments["seed"]) if page_rows else case)


def test_a_long_chain_is_a_prompt(library):
    compare(library, random_case(130, nodes=130, tree=False, context=90, splits=3))


def test_rows_before_the_window_are_not_read(library):
    case = random_case(5, window=40, nodes=6, context=200)
    for b in range(case.batch):
        case.key_cache[b, :, : case.cache_len[b] - 40] = case.value_cache[b, :, : case.cache_len[b] - 40] = np.nan
    output, *_ = run(library, case)
    assert np.isfinite(output.astype(np.float32)).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize(("name", "splits"), [("key_cache", 3), ("value_cache", 1)])
def test_padding_is_zero_whatever_the_cache_holds(library, name, splits, poison):
    """Padding beside real rows, and a tile of nothing else; 0 · NaN is NaN."""
    case = random_case(12, nodes=40, splits=splits, context=300)
    case.counts = np.array([3, 40], np.int32)
    case.cache_len[:] = 150
    getattr(case, name)[:, :, :150] = poison
    output, *_, faults = run(library, case)
    output = output.astype(np.float32)
    assert not faults.any()
    assert not np.isfinite(output[0, :3]).any()
    assert not np.isfinite(output[1]).any()
    assert not output[0, 3:].any()


@pytest.mark.slow(but=("host_kernels-1",))
@pytest.mark.parametrize("seed", range(1, 7))
@pytest.mark.parametrize("way", ["host_kernels", pytest.param("bulk", marks=pytest.mark.soak)])
def test_no_order_of_threads_matters(request, way, seed, in_order):
    library = request.getfixturevalue(way)
    for n, (nodes, splits, size, cache) in enumerate([(5, 3, 64, None), (20, 2, 128, Dtype.E4M3), (64, 1, 256, None)]):
        case = random_case(n, nodes=nodes, splits=splits, size=size, cache_dtype=cache, ragged=True)
        usual = run(library, case)
        with in_order(library.library, seed):
            assert [a.tobytes() for a in run(library, case)] == [a.tobytes() for a in usual]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"parents": (1, 3, 3)}, Fault.PARENT),
        ({"parents": (1, 0, -2)}, Fault.PARENT),
        ({"cache_len": (1, 10**6)}, Fault.CAPACITY),
        ({"cache_len": (1, 2**31 - 3)}, Fault.CAPACITY),
        ({"cache_len": (1, -1)}, Fault.CAPACITY),
        ({"counts": (1, 6)}, Fault.CAPACITY),
        ({"tree_offset": (1, 3)}, Fault.CAPACITY),
    ],
)
def test_faults_in_memory(kernels, change, fault):
    (name, (*at, value)), case = next(iter(change.items())), random_case(8, offset=2, ragged=True, splits=2)
    assert case.counts is not None
    case.counts[:] = 5
    getattr(case, name)[tuple(at)] = value
    output, keys, values, faults = run(kernels, case)
    assert faults.tolist() == [Fault.NONE, fault]
    assert not output[1].any()
    assert output[0].any()
    assert keys[1].tobytes() == case.key_cache[1].tobytes()
    assert values[1].tobytes() == case.value_cache[1].tobytes()


@pytest.mark.nightly
@pytest.mark.parametrize("past", [-1, 0, 2**30], ids=["negative", "one past the last", "far"])
@pytest.mark.parametrize(
    ("nodes", "tree", "window", "seen"),
    [(5, True, 0, range(10)), (50, False, 0, range(13)), (5, True, 60, range(5, 10)), (50, False, 60, range(5, 13))],
)
def test_a_page_that_is_none(library, nodes, tree, window, seen, past):
    """Of 150 committed rows and the new ones on pages of 16; the two row tiles of 50 nodes end on different ones."""
    case = random_case(9, nodes=nodes, tree=tree, window=window, splits=3, context=300)
    case.cache_len[:] = 150
    capacity = case.key_cache.shape[2] // 16
    for at in range(capacity):
        paged = case.paged(16)
        assert paged.page_table is not None
        paged.page_table[1, at] = past if past < 0 else len(paged.key_cache) + past
        faulty = at in seen
        output, keys, values, faults = run(library, paged, linear=False)
        assert faults.tolist() == [Fault.NONE, Fault.PAGE if faulty else Fault.NONE]
        assert output[0].any()
        assert output[1].any() != faulty
        others = np.delete(np.arange(len(keys)), paged.page_table[0])
        for new, old in ((keys, paged.key_cache), (values, paged.value_cache)):
            assert (new[others].tobytes() == old[others].tobytes()) == faulty


def test_splits_fill_the_machine_and_no_more(host):
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": Dtype.BF16, "cache_dtype": Dtype.BF16}
    one, many = (Attention(batch=batch, nodes=8, capacity=2**17, **sizes) for batch in (1, 64))
    found = [host.splits(one, processors) for processors in (1, 16, 132, 1000)]
    assert found == sorted(found)
    assert 1 == found[0] < found[2] < found[3] == 64
    assert host.splits(many, 132) == 1
    many.splits = 1
    assert host.workspace(many) == 0


@pytest.mark.parametrize(("first", "window", "splits"), [(61, 0, 1), (126, 70, 3), (190, 0, 3)])
def test_a_first_path_has_the_bits_of_one_token_at_a_time(library, first, window, splits):
    """Rows that a tree adds, across tiles and parts, give each of its nodes what they give it as committed rows."""
    tree = random_case(first, batch=1, nodes=8, context=300, window=window, splits=splits)
    tree.cache_len[:] = first
    tree.parents = np.array([[-1, 0, 1, 2, 3, 0, 5, 5]], np.int32)
    tree.key_cache[:, :, first:] = tree.value_cache[:, :, first:] = np.nan
    together, *_ = run(library, tree)
    caches = {"key_cache": tree.key_cache, "value_cache": tree.value_cache}
    for node in range(5):
        rows = {name: np.repeat(getattr(tree, name)[:, node : node + 1], 8, 1) for name in ("query", "key", "value")}
        one = replace(tree, **rows, **caches, counts=np.array([1], np.int32), cache_len=tree.cache_len + node)
        output, caches["key_cache"], caches["value_cache"], _ = run(library, one)
        assert output[0, 0].tobytes() == together[0, node].tobytes()


@pytest.mark.parametrize("paged", [False, True])
def test_a_part_without_rows_is_not_read(library, host, paged):
    """The splits are the capacity's, the parts those of the text there is; and padding has no parts at all."""
    case = random_case(2, nodes=3, context=200, capacity=4096)
    case.cache_len[:], case.counts = (100, 30), np.array([3, 2], np.int32)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": case.dtype, "cache_dtype": case.dtype}
    case.splits = host.splits(Attention(batch=2, nodes=3, capacity=4096, **sizes), 40)
    assert case.splits > 8
    compare(library, case.paged(16) if paged else case)
