"""The grids are the library's, and so are the refusals."""

import ctypes
import itertools
import json
from ctypes import c_char_p, c_void_p
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import LAUNCHERS, Choose, Dtype
from specbuild.runtime.backends.kernels.grids import (
    ATTENTION,
    KERNELS,
    PRODUCTS,
    Launch,
    launches,
    splits,
    workspace,
)
from specbuild.runtime.errors import OptionError

REPORT = Path(__file__).resolve().parents[4] / "benchmarks" / "results" / "kernels-report.json"
ADDRESS = 1 << 20  # of nothing: what is noted is not run
GROWING = {"batch": 3, "pool": 40, "frontiers": 4, "best": 4, "rows": 20, "nodes": 12}
ACCEPTED = {
    "choose_tokens": {
        "batch": 2,
        "nodes": 5,
        "tree_nodes": 9,
        "vocab": 5000,
        "best": 4,
        "stride": 1 << 19,
        "cut_offs": 1,
    },
    "walk_tree": {"batch": 3, "nodes": 7, "vocab": 50},
    "commit_path": {"batch": 2, "nodes": 6},
    "tree_mask": {"batch": 3, "nodes": 5, "tree_nodes": 9, "capacity": 3000, "shift": -1},
    "grow_level": GROWING,
    "finish_tree": GROWING,
    "tree_attention": {"batch": 2, "nodes": 9, "tree_nodes": 20, "heads": 8, "kv_heads": 2, "head_dim": 64}
    | {"capacity": 640, "page_rows": 64, "pages": 30, "rotary_dim": 64, "positions": 99, "scale": 1, "softcap": 0}
    | {"splits": 2, "dtype": Dtype.F16, "cache_dtype": Dtype.E4M3, "norm_epsilon": 0}
    | {"query_stride": 4096, "key_stride": 4096, "value_stride": 4096},
    "block_product": {"rows": 20, "inner": 768, "columns": 99, "bits": 6, "block": 16, "scale_bits": 8}
    | {"minimum_bits": 8, "dtype": Dtype.BF16},
    "publish": {"rounds": 4, "batch": 3, "nodes": 5, "most": 9},
}
CACHE = {"count": 6, "heads": 3, "row_bytes": 80, "capacity": 640, "page_rows": 64, "pages": 30}
EDGES = [-1, 0, 63, 64, 65, 512, 513, 4096, 4097, 65535, 65536, 1 << 19, (1 << 19) + 1, 1 << 30]
NUMBERS = {
    "dtype": st.integers(-1, 6),
    "heads": st.integers(-1, 5000),  # times row_bytes within 31 bits
    "row_bytes": st.one_of(st.integers(-8, 300), st.sampled_from([8, 16, 24, 512, 1 << 16])),
    "page_rows": st.sampled_from([-64, 0, 1, 63, 64, 128, 1024]),
    "pages": st.integers(-1, 2),
    "bits": st.integers(3, 9),
    "block": st.sampled_from([8, 16, 32, 96, 128]),
    "scale_bits": st.sampled_from([0, 4, 8, 16, 32]),
    "minimum_bits": st.sampled_from([-8, 0, 8, 16, 32]),
}


def everywhere():
    """The kernels that were compiled for every architecture; a row has None where one was not."""
    kernels = json.loads(REPORT.read_text(encoding="utf-8"))["kernels"]
    return {name for name, row in kernels.items() if isinstance(row["registers"], int) or None not in row["registers"]}


def accepted(name, **changed):
    """A struct that a launcher takes, every pointer set; and it with the structs inside it."""
    params = LAUNCHERS[name](**ACCEPTED[name] | changed)
    parts = [params, *getattr(params, "caches", ())]
    for part in parts:
        for field, kind in part._fields_:
            if kind is c_void_p:
                setattr(part, field, ADDRESS)
        if part is not params:
            for field, value in CACHE.items():
                setattr(part, field, value)
    return params, parts


@st.composite
def structs(draw):
    """A launcher and a struct, some of whose fields are anything."""
    name = draw(st.sampled_from(sorted(ACCEPTED)))
    params, parts = accepted(name)
    for _ in range(draw(st.integers(0, 4))):
        part = draw(st.sampled_from(parts))
        field, kind = draw(st.sampled_from([field for field in part._fields_ if field[0] != "caches"]))
        number = NUMBERS.get(field, st.one_of(st.integers(1, 70), st.integers(1, 20000), st.sampled_from(EDGES)))
        signed = number if kind in (ctypes.c_int32, ctypes.c_int64) else st.integers(0, 2**64 - 1)
        setattr(part, field, None if kind is c_void_p else draw(signed))
    return name, params


@pytest.fixture(scope="module")
def noted(host):
    """What the library launches for a struct, without running it."""
    library = ctypes.CDLL(str(host.path))
    library.specbuild_host_launches.restype = c_char_p

    def note(name, params):
        library.specbuild_host_launches()
        library.specbuild_host_dry(1)
        try:
            host.launch(name, params)
        finally:
            library.specbuild_host_dry(0)
        lines = [line.split() for line in library.specbuild_host_launches().decode().splitlines()]
        return [Launch(kernel, *map(int, grid)) for kernel, *grid in lines]

    return note


@pytest.mark.slow
@settings(max_examples=400)
@given(case=structs())
def test_grids_refusals_and_workspaces_are_the_librarys(noted, host, case):
    name, params = case
    try:
        expected = noted(name, params)
    except OptionError:
        with pytest.raises(OptionError):
            launches(name, params)
    else:
        assert launches(name, params) == expected
        if name in ("choose_tokens", "tree_attention"):
            assert workspace(params) == host.workspace(params)


@pytest.mark.parametrize("name", KERNELS)
def test_every_type_has_its_kernel(noted, name):
    types = range(len(Dtype)) if hasattr(LAUNCHERS[name], "dtype") else [None]
    found = list[Launch]()
    for dtype in types:
        params, _ = accepted(name, **{} if dtype is None else {"dtype": dtype})
        try:
            found += launches(name, params)
        except OptionError:
            with pytest.raises(OptionError):
                noted(name, params)
    assert {launch.kernel for launch in found} == set(KERNELS[name])
    assert set(KERNELS[name]) <= everywhere()


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_attention_of_every_shape(noted, host, size):
    """The library's kernel, shared memory, splits and workspace, for few rows and many, in each pair of types."""
    found = set[str]()
    for nodes, dtype, cache in itertools.product((1, 6, 40), (Dtype.F16, Dtype.BF16), (None, Dtype.E4M3)):
        params, _ = accepted(
            "tree_attention", head_dim=size, nodes=nodes, tree_nodes=64, dtype=dtype, cache_dtype=cache or dtype
        )
        params.key_scale = params.value_scale = ADDRESS if cache else None
        for processors in (1, 20, 132):
            assert splits(params, processors) == host.splits(params, processors)
        params.splits = splits(params, 132)
        assert workspace(params) == host.workspace(params)
        expected = noted("tree_attention", params)
        assert launches("tree_attention", params) == expected
        found |= {launch.kernel for launch in expected}
    assert found == {name for name in ATTENTION if f"_d{size}_" in name or "combine" in name}
    assert found <= everywhere()


def test_products_of_every_form(noted):
    """A kernel for each type and number of bits, and for few rows, more and many."""
    found = set[str]()
    for rows, bits, dtype in itertools.product((8, 9, 16, 17, 600), (4, 5, 6, 8), (Dtype.F16, Dtype.BF16)):
        params, _ = accepted("block_product", rows=rows, bits=bits, block=32, dtype=dtype)
        expected = noted("block_product", params)
        assert launches("block_product", params) == expected
        found |= {launch.kernel for launch in expected}
    assert found == set(PRODUCTS)
    assert found <= everywhere()


def test_other_kernels_are_refused():
    with pytest.raises(OptionError, match="make_noise is not among"):
        launches("make_noise", LAUNCHERS["make_noise"]())
    with pytest.raises(OptionError, match="walk_tree takes Walk, not Choose"):
        launches("walk_tree", Choose())
