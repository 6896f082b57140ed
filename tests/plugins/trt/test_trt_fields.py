"""The plugin's fields: defaults, refusals, what is serialized and cloned."""

import numpy as np
import pytest

INPUTS = "query,key,value,past_key,past_value,parents,cache_len,tree_offset,cos,sin"

OTHERS = {
    "scale": 0.125,
    "softcap": 30.0,
    "norm_epsilon": np.float32(1e-5),
    "window": 512,
    "splits": 3,
    "processors": 132,
    "fault": 1,
    "inputs": "qkv,past_key,past_value,cache_len,page_table",
    "in_place": "alias",
}


def test_what_is_serialized_makes_the_same_plugin(make):
    first = make(**OTHERS)
    assert first.fields() == OTHERS
    second = make(**first.fields(), runtime=True)
    assert second.fields() == OTHERS
    assert second.call("metadata") == first.call("metadata") == first.call("timing_id")


@pytest.mark.parametrize("how", ["clone", "attach"])
def test_a_clone_is_the_same_and_lives_on(make, how):
    first = make(**OTHERS)
    clone = make(first, how)
    first.call("free")
    first.handle = None
    assert clone.fields() == OTHERS
    assert clone.call("aliased", 1) == 1


def test_the_builds_device_is_remembered(make):
    assert make(scale=1.0, device=132).fields()["processors"] == 132
    assert make(scale=1.0, device=132, processors=80).fields()["processors"] == 80
    # An engine keeps the number that its workspace was measured for.
    assert make(scale=1.0, device=132, runtime=True).fields()["processors"] == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale": 0.0}, "scale 0: give a positive one"),
        ({"scale": [1.0, 2.0]}, "the field 'scale' takes one FLOAT32, not 2 of type 1"),
        ({"in_place": 1}, "the field 'in_place' takes text, not 1 of type 5"),
        ({"heads": 4}, "there is no field 'heads'"),
        ({"fault": 2}, "fault 2: 0 or 1"),
        ({"in_place": "copy"}, "in_place 'copy': use 'alias' or 'address'"),
        ({"inputs": "query,keys"}, "inputs: there is no input 'keys'"),
        ({"inputs": "key,query"}, "inputs: 'query' cannot come after 'key'"),
        ({"inputs": "query,key,past_key"}, "inputs: either query, key and value, or qkv, in 'query,key,past_key'"),
        ({"inputs": "qkv,past_key,past_value"}, "inputs: cache_len is missing in 'qkv,past_key,past_value'"),
        ({"inputs": INPUTS[:-4]}, f"inputs: cos and sin come together, in '{INPUTS[:-4]}'"),
    ],
)
def test_refused_fields(make, fields, message):
    plugin = make(**{"scale": 1.0} | fields)
    assert not plugin.handle
    assert plugin.log() == f"error: {message}\n"
