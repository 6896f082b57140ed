"""Every launcher refuses what it is given wrongly, in one line that names it, before anything runs."""

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbuild.runtime.backends.kernels.abi import LAUNCHERS, Cache, Dtype
from specbuild.runtime.errors import OptionError

ADDRESS = 4096  # of every array: aligned, and no memory of this process, so whatever is launched crashes
SOUND = {
    "tree_attention": {
        **{"batch": 2, "nodes": 5, "tree_nodes": 5, "heads": 4, "kv_heads": 2, "head_dim": 64, "capacity": 176},
        **{"rotary_dim": 64, "positions": 176, "splits": 1, "dtype": Dtype.BF16, "cache_dtype": Dtype.BF16},
        **{"query_stride": 512, "key_stride": 512, "value_stride": 512, "scale": 0.125, "norm_epsilon": 1e-6},
        **{"page_table": None, "key_scale": None, "value_scale": None},
    },
    "choose_tokens": {
        "batch": 1,
        "nodes": 2,
        "tree_nodes": 2,
        "vocab": 10,
        "best": 1,
        "stride": 10,
        "dtype": Dtype.F32,
    },
    "make_noise": {"rows": 1, "vocab": 4},
    "walk_tree": {"batch": 1, "nodes": 2, "vocab": 5},
    "commit_path": {"batch": 1, "nodes": 3},
    "tree_mask": {"batch": 1, "nodes": 2, "tree_nodes": 2, "capacity": 4, "dtype": Dtype.BOOL},
    "grow_level": {"batch": 1, "pool": 17, "frontiers": 4, "best": 4, "rows": 8, "nodes": 5},
    "finish_tree": {"batch": 1, "pool": 17, "frontiers": 4, "best": 4, "rows": 8, "nodes": 5},
    "publish": {"batch": 1, "nodes": 3, "rounds": 2},
    "block_product": {"rows": 1, "inner": 64, "columns": 16, "bits": 8, "block": 32, "scale_bits": 16}
    | {"minimum_bits": 0, "dtype": Dtype.F16},
}
CACHE = {"count": 2, "heads": 1, "row_bytes": 16, "capacity": 8, "page_table": None}
NO_SIZES = {"shift", "cut_offs", "first", "trunk"}
OPTIONAL = {  # arrays that may be missing
    *("parents counts history masks scores fault row_nodes tree_offset output positions rows ends").split(),
    *("stop query_norm key_norm sinks workspace roots pair page_table key_scale value_scale node_rows").split(),
}
NEEDED = {"publish": {"counts"}, "tree_attention": {"output"}}
TOGETHER = {"bias_tokens", "bias_values", "salts", "page_table", "key_scale", "value_scale"}  # with another field


def struct(name, cache=False, **change):
    """Sound parameters but for a change, of the first cache if that is asked."""
    params = LAUNCHERS[name]()
    parts = [(params, SOUND[name] | ({} if cache else change))]
    if name == "commit_path":
        parts.append((params.caches[0], CACHE | (change if cache else {})))
    for part, values in parts:
        for field, kind in type(part)._fields_:
            if kind is ctypes.c_void_p:
                setattr(part, field, ADDRESS)
        for field, value in values.items():
            setattr(part, field, value)
    return params


def refusal(kernels, name, **change):
    with pytest.raises(OptionError) as caught:
        kernels.launch(name, struct(name, **change))
    return str(caught.value)


@settings(max_examples=300)
@given(name=st.sampled_from([*SOUND, "cache"]), wrong=st.integers(-(2**31), -10), data=st.data())
def test_no_array_lies_anywhere_and_no_size_is_negative(kernels, name, wrong, data):
    cache, name = name == "cache", "commit_path" if name == "cache" else name
    kinds = dict((Cache if cache else LAUNCHERS[name])._fields_)
    arrays = [field for field, kind in kinds.items() if kind is ctypes.c_void_p and field not in TOGETHER]
    numbers = [field for field, kind in kinds.items() if kind in (ctypes.c_int32, ctypes.c_int64)]
    field = data.draw(st.sampled_from([*arrays, *sorted({*numbers} - NO_SIZES)]))
    if field in numbers:
        said = "an unknown type" if field.endswith("dtype") else str(wrong)
        assert said in refusal(kernels, name, cache=cache, **{field: wrong})
        return
    if field != "logits":
        assert field in refusal(kernels, name, cache=cache, **{field: ADDRESS + 2})
    if field not in OPTIONAL - NEEDED.get(name, set()):
        assert field in refusal(kernels, name, cache=cache, **{field: None})


NO_MATCH = {  # what does not fit the rest, or is not known
    "tree_attention": [
        *({field: value} for field, value in (
            *(("head_dim", 72), ("dtype", Dtype.F32), ("cache_dtype", Dtype.F16), ("heads", 3), ("nodes", 65)),
            *(("tree_nodes", 4), ("pages", 3), ("page_rows", 16), ("rotary_dim", 24), ("positions", 0)),
            *(("splits", 65), ("softcap", -2.0), ("softcap", float("inf")), ("scale", 0.0), ("output", 8)),
            *(("query_stride", 100), ("key_scale", ADDRESS)),
        )),
        *({"page_rows": rows, "page_table": ADDRESS} for rows in (24, 16)),
        *({"splits": 2, "workspace": None}, {"parents": None, "nodes": 10**6}, {"batch": 60000, "heads": 10**6}),
    ],
    "choose_tokens": [
        *({"dtype": Dtype.E4M3}, {"vocab": (1 << 19) + 1}, {"best": 65}, {"stride": 8}, {"bias_values": None}),
        {"tree_nodes": 1, "row_nodes": None},
    ],
    "commit_path": [
        *({"cache": True, field: value} for field, value in (("row_bytes", 12), ("page_rows", 4), ("pages", 2))),
        *({"cache": True, "page_rows": rows, "page_table": ADDRESS} for rows in (3, 4)),
    ],
    "tree_mask": [{"capacity": 1}],
    "block_product": [
        *({"dtype": Dtype.F32}, {"bits": 7}, {"block": 48}, {"bits": 5, "block": 16}, {"inner": 48}),
        *({"scale_bits": 4}, {"scale_bits": 8, "minimum_bits": 16}),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name in NO_MATCH for change in NO_MATCH[name]], ids=str
)
def test_what_does_not_fit_together(kernels, name, change):
    refusal(kernels, name, **change)
