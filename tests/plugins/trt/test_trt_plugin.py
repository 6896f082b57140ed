"""The plugin called as TensorRT would, with the kernels run on this CPU."""

from ctypes import byref, c_char_p

import ml_dtypes
import numpy as np
import pytest

from specbuild.runtime.backends.kernels.abi import Attention, Dtype, Fault

INPUTS = "query,key,value,past_key,past_value,parents,cache_len,tree_offset,cos,sin"
HALVES = ["float16"] * 5 + ["int32"] * 3 + ["float32"] * 2


def tensors(batch=2, nodes=4, heads=4, kv_heads=2, size=64, **changed):
    """Shapes and types of the default inputs, and of the outputs."""
    cache = batch, kv_heads, 512, size
    new = batch, nodes, kv_heads, size
    shapes = {
        **{"query": (batch, nodes, heads, size), "key": new, "value": new, "past_key": cache, "past_value": cache},
        **{"parents": (batch, nodes), "cache_len": (batch,), "tree_offset": (batch,)},
        **{"cos": (300, size // 2), "sin": (300, size // 2)},
    } | changed
    outputs = [(shapes[name], "float16") for name in ("query", "past_key", "past_value")]
    return [*zip(shapes.values(), HALVES, strict=True), *outputs]


def values():
    """Inputs of a call: a tree of 4 nodes, 2 sequences, 4 heads over 2 of keys and values."""
    random = np.random.default_rng(0)
    found = {}
    for name, (shape, dtype) in zip(INPUTS.split(","), tensors(), strict=False):
        found[name] = random.standard_normal(shape).astype(dtype)
    found["parents"][:] = -1, 0, 0, 1
    found["cache_len"][:] = 5, 290
    found["tree_offset"][:] = 0
    return found


def launched(harness, given, **numbers):
    """What the launcher gives, called directly on copies."""
    inputs = {name: array.copy() for name, array in given.items()}
    keys, caches, out = inputs["key"], [inputs["past_key"], inputs["past_value"]], np.full_like(inputs["query"], 9)
    (batch, nodes, heads, size), kv_heads = out.shape, keys.shape[2]
    fault = np.full(batch, 0, np.int32)
    names = {"past_key": "key_cache", "past_value": "value_cache"}
    addresses = {names.get(name, name): array.ctypes.data for name, array in inputs.items()}
    sizes = {"batch": batch, "nodes": nodes, "tree_nodes": nodes, "head_dim": size}
    strides = {"query_stride": heads * size, "key_stride": kv_heads * size, "value_stride": kv_heads * size}
    rest = {"capacity": 512, "rotary_dim": size, "positions": 300, "splits": 1, "scale": 0.5}
    rest |= {"heads": heads, "kv_heads": kv_heads, "dtype": Dtype.F16, "cache_dtype": Dtype.F16}
    params = Attention(
        **addresses, **sizes, **strides, **rest | numbers,
        output=out.ctypes.data, fault=fault.ctypes.data,
    )  # fmt: skip
    harness.specbuild_error.restype = c_char_p
    assert harness.specbuild_tree_attention(byref(params), None) == 0, harness.specbuild_error()
    return [out, *caches, fault]


def enqueued(plugin, given, workspace=None):
    """Status and outputs of the plugin, on copies, in place."""
    inputs = {name: array.copy() for name, array in given.items()}
    batch, nodes = next(iter(inputs.values())).shape[:2]
    out, fault = np.full((batch, nodes, 4, 64), 9, np.float16), np.full(batch, 9, np.int32)
    outputs = [out, inputs["past_key"], inputs["past_value"], fault]
    return plugin.enqueue([*inputs.values()], outputs[: plugin.call("outputs")], workspace), outputs


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


def test_a_tree_of_no_nodes_is_a_chain(make, harness):
    """As a prompt's chunk is, which may have more nodes than a tree."""
    given = values() | {"parents": np.zeros((2, 0), np.int32)}
    status, found = enqueued(make(scale=0.5, splits=1), given)
    assert status == 0
    chain = values()
    chain["parents"][:] = -1, 0, 1, 2
    assert_same(found[:3], launched(harness, chain)[:3])
    shapes = tensors(nodes=200, parents=(2, 0))
    assert make(scale=1.0).configure(shapes) == 0
    assert make(scale=1.0).configure(tensors(nodes=200)) != 0


def test_output_shapes(make):
    shapes = [shape for shape, _ in tensors()]
    query, cache = shapes[0], shapes[3]
    assert make(scale=1.0).shapes(shapes[:10]) == [query, cache, cache]
    assert make(scale=1.0, fault=1).shapes(shapes[:10], 4) == [query, cache, cache, (2,)]
    packed = make(scale=1.0, inputs="qkv,past_key,past_value,cache_len")
    assert packed.shapes([(2, 4, 8, 64), cache, cache, (2,)]) == [query, cache, cache]
    assert packed.shapes(shapes[:10]) is None
    assert packed.log() == "error: 10 inputs: the field 'inputs' names qkv,past_key,past_value,cache_len\n"
    assert packed.shapes([(2, 4, 512), cache, cache, (2,)]) is None
    assert packed.log() == "error: activations and caches have 4 dimensions, not 3 and 4\n"


@pytest.mark.parametrize("activations", ["float16", "bfloat16"])
@pytest.mark.parametrize("eight", [False, True])
def test_formats_are_linear_and_of_the_right_type(make, activations, eight):
    cache = "float8_e4m3fn" if eight else activations
    types = [activations] * 3 + [cache] * 2 + HALVES[5:] + [activations, cache, cache, "int32"]
    plugin = make(scale=1.0, fault=1)
    for position, right in enumerate(types):
        others = {0: {"float16", "bfloat16"}, 3: {activations, "float8_e4m3fn"}}
        taken = others.get(position, {right})
        for asked in ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "int32"):
            given = [*types[:position], asked, *types[position + 1 :]]
            assert plugin.supports(position, given, 4) == (asked in taken), (position, asked)
        assert not plugin.supports(position, types, 4, layout=1)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"size": 32}, "head size 32: TreeAttention has 64, 80, 96, 128 and 256"),
        ({"heads": 3}, "3 heads cannot share 2 key/value heads: use a multiple"),
        ({"parents": (2, 3)}, "a tree of 3 nodes for 4 new ones: use 4 to 64"),
        ({"cos": (300, 20), "sin": (300, 20)}, "rotary dimension 40 of a head size of 64: use a multiple of 16"),
        ({"key": (2, 4, 128)}, "key has 3 dimensions: use 4"),
        ({"cache_len": (3,)}, "cache_len's dimension 0 is 3: an earlier input has 2"),
        ({"cache_len": (-1,)}, "cache_len's dimension 0 is -1"),
    ],
)
def test_refused_shapes(make, shapes, message):
    plugin = make(scale=1.0)
    assert plugin.configure(tensors(**shapes)) != 0
    assert plugin.log() == f"error: {message}\n"


def test_the_workspace_holds_any_smaller_problem(make):
    assert make(scale=1.0).workspace(tensors()) == 0
    assert make(scale=1.0, splits=3).workspace(tensors()) == 2 * 4 * 4 * 3 * (64 + 2) * 4
    plugin = make(scale=1.0, device=8)
    alone = plugin.workspace(tensors(batch=1, past_key=(1, 2, 4096, 64), past_value=(1, 2, 4096, 64)))
    # Eight sequences fill the device without a split; one of them alone is split.
    eight = plugin.workspace(tensors(batch=8, past_key=(8, 2, 4096, 64), past_value=(8, 2, 4096, 64)))
    assert eight >= alone == 4 * 4 * 8 * (64 + 2) * 4


@pytest.mark.parametrize("splits", [1, 2])
def test_enqueue_computes_what_the_launcher_does(make, harness, splits):
    plugin = make(scale=0.5, softcap=20.0, window=100, splits=splits, runtime=True)
    memory = np.zeros(plugin.workspace(tensors()) // 4 + 4, np.float32)
    memory = memory[-memory.ctypes.data % 16 // 4 :]
    given = values()
    status, found = enqueued(plugin, given, memory)
    assert status == 0, plugin.log()
    numbers = {"softcap": 20.0, "window": 100, "splits": splits, "workspace": memory.ctypes.data}
    assert_same(found[:3], launched(harness, given, **numbers)[:3])
    assert not (found[0] == 9).any()
    assert (found[1] != given["past_key"]).any(axis=(1, 3)).sum() == 8


def test_every_input_arrives(make, harness):
    given = values()
    tables = {"query_norm": (64,), "key_norm": (64,), "key_scale": (2,), "value_scale": (2,), "sinks": (4,)}
    given |= {name: np.ones(shape, np.float32) for name, shape in tables.items()}
    given |= {"counts": np.full(2, 4, np.int32), "page_table": np.zeros((2, 4), np.int32)}
    given |= {name: np.zeros((9, 2, 32, 64), ml_dtypes.float8_e4m3fn) for name in ("past_key", "past_value")}
    order = [*INPUTS.split(","), "query_norm", "key_norm", "counts", "page_table", "key_scale", "value_scale", "sinks"]
    fields = {"softcap": 3.0, "norm_epsilon": 0.25, "window": 7, "splits": 1}
    plugin = make(**fields, scale=0.5, inputs=",".join(order), fault=1, runtime=True)
    outputs = [np.zeros_like(given["query"]), given["past_key"], given["past_value"], np.zeros(2, np.int32)]
    assert plugin.enqueue([given[name] for name in order], outputs) == 1
    assert plugin.log() == "error: this library was compiled without head size 64 in float16\n"
    found = {name: getattr(harness.harness_launched().contents, name) for name, _ in Attention._fields_}
    names = {"past_key": "key_cache", "past_value": "value_cache"}
    assert {name: found.pop(names.get(name, name)) for name in order} == {n: given[n].ctypes.data for n in order}
    assert [found.pop("output"), found.pop("fault")] == [outputs[0].ctypes.data, outputs[3].ctypes.data]
    assert found == fields | {
        "scale": 0.5,
        "workspace": None,
        **{"query_stride": 256, "key_stride": 128, "value_stride": 128, "rotary_dim": 64, "positions": 300},
        **{"batch": 2, "nodes": 4, "tree_nodes": 4, "heads": 4, "kv_heads": 2, "head_dim": 64},
        **{"capacity": 128, "page_rows": 32, "pages": 9, "dtype": Dtype.F16, "cache_dtype": Dtype.E4M3},
    }


def test_packed_activations_give_the_same(make):
    given = values()
    packed = {"qkv": np.concatenate([given.pop(name) for name in ("query", "key", "value")], axis=2)} | given
    plugin = make(scale=0.5, inputs=",".join(packed), runtime=True)
    assert plugin.configure([(each.shape, each.dtype.name) for each in packed.values()] + tensors()[10:]) == 0
    status, found = enqueued(plugin, packed)
    assert status == 0, plugin.log()
    assert_same(found[:3], enqueued(make(scale=0.5, runtime=True), values())[1][:3])


def test_a_paged_cache_gives_the_same(make):
    """And says where its table names a page that is none; while a network is built nothing looks at the table."""
    given, linear = values(), enqueued(make(scale=0.5, runtime=True), values())[1]
    order = np.random.default_rng(1).permutation(16).astype(np.int32)

    def pages(cache):
        rows = cache.reshape(2, 2, 8, 64, 64).transpose(0, 2, 1, 3, 4).reshape(16, 2, 64, 64)
        return np.ascontiguousarray(rows[np.argsort(order)])

    paged = given | {name: pages(given[name]) for name in ("past_key", "past_value")}
    paged["page_table"] = order.reshape(2, 8)
    plugin = make(scale=0.5, inputs=",".join(paged), runtime=True)
    status, found = enqueued(plugin, paged)
    assert status == 0, plugin.log()
    assert_same(found[:3], [linear[0], pages(linear[1]), pages(linear[2])])
    paged["page_table"][1, 0] = 16
    status, found = enqueued(make(scale=0.5, inputs=",".join(paged), fault=1, runtime=True), paged)
    assert (status, found[3].tolist()) == (0, [Fault.NONE, Fault.PAGE])
    building = make(scale=0.5, inputs=",".join(paged), fault=1)
    status, found = enqueued(building, paged)
    assert (status, building.log()) == (0, "warning: not run: nothing is in place yet\n")
    assert (found[0] == 9).all()
    assert (found[3] == 9).all()


def test_faults_are_reported(make):
    given = values()
    given["cache_len"][1] = 510
    status, found = enqueued(make(scale=0.5, fault=1, runtime=True), given)
    assert status == 0
    assert found[3].tolist() == [Fault.NONE, Fault.CAPACITY]
    assert not found[0][1].any()


@pytest.mark.parametrize("mode", ["alias", "address"])
def test_caches_must_be_in_place_when_it_counts(make, mode):
    given = values()
    outputs = [np.full_like(given["query"], 9), given["past_key"], given["past_value"].copy()]
    plugin = make(scale=0.5, in_place=mode, runtime=True)
    assert plugin.enqueue([*given.values()], outputs) != 0
    advice = {"alias": "build with the preview feature ALIASED_PLUGIN_IO_10_03", "address": "bind the same one to both"}
    both = "past_key and present_key, past_value and present_value must each have one address"
    assert plugin.log() == f"error: {both}: {advice[mode]}\n"
    building = make(scale=0.5, in_place=mode)
    assert building.enqueue([*given.values()], outputs) == 0
    assert building.log() == "warning: not run: nothing is in place yet\n"
    assert (outputs[0] == 9).all()


def test_what_the_launcher_refuses_is_logged(make):
    plugin = make(scale=0.5, splits=2, runtime=True)
    assert enqueued(plugin, values())[0] == 1
    assert plugin.log() == "error: 2 splits need a workspace of 16896 bytes\n"
