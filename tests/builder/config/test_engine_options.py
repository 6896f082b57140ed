"""What may be asked of engines, and what each backend has not."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbuild.builder.config.engine_options import EngineOptions, architectures
from specbuild.runtime.bundle.backend import BACKENDS
from specbuild.runtime.errors import OptionError


@pytest.mark.parametrize(
    ("wanted", "found"), [([], ()), (["portable"], ()), (["89,sm_120", "89"], ("89", "120")), (["sm_75"], ("75",))]
)
def test_architectures(wanted, found):
    assert architectures(wanted) == found


OUT_OF_RANGE = {
    "builder_optimization_level": st.integers(max_value=-1) | st.integers(min_value=6),
    "workspace": st.integers(max_value=0) | st.integers(min_value=4194305),
    "prompt_chunk": st.integers(max_value=63) | st.integers(min_value=4097),
    "attention": st.text().filter(lambda text: text not in ("plugin", "native")),
    "kv_cache_dtype": st.none() | st.text().filter(lambda text: text not in ("auto", "fp8")),
    "block_size": st.integers().filter(lambda rows: rows not in (0, 16, 32, 64, 128, 256)),
    "hardware_compatible": st.text(min_size=1).filter(lambda text: text != "ampere-plus"),
    "arch": st.sampled_from([("90",), ("portable", "89"), ("",), ("x,89",)]),
}


@given(st.sampled_from(sorted(OUT_OF_RANGE)).flatmap(lambda name: OUT_OF_RANGE[name].map(lambda value: (name, value))))
def test_what_is_out_of_range_is_refused_by_its_name(wrong):
    name, value = wrong
    with pytest.raises(OptionError) as caught:
        EngineOptions(**{name: value})
    assert "\n" not in str(caught.value)
    assert name.replace("_", "-") in str(caught.value) or name == "arch"


PLUGIN = {"kv_cache_dtype": "fp8", "block_size": 64}
FLAGS = {
    "arch": ("89",),
    "prompt_chunk": 256,
    "weight_streaming": True,
    "attention": "native",
    "timing_cache": Path("cache"),
    "version_compatible": True,
    "hardware_compatible": "ampere-plus",
} | PLUGIN
TAKEN = {
    "onnxruntime": set[str](),
    "onnxruntime-cuda": {"attention"},
    "tensorrt": FLAGS.keys() - {"arch"},
    "tensorrt-rtx": FLAGS.keys() - {"timing_cache", "version_compatible", "hardware_compatible", *PLUGIN},
}


@pytest.mark.parametrize("backend", TAKEN)
@pytest.mark.parametrize("name", FLAGS)
def test_what_a_backend_has_not_is_refused_and_not_ignored(backend, name):
    options = EngineOptions(**{name: FLAGS[name]})
    if name in TAKEN[backend]:
        options.check(BACKENDS[backend])
        return
    with pytest.raises(OptionError, match=f"--{name.replace('_', '-')}"):
        options.check(BACKENDS[backend])


@pytest.mark.parametrize(("name", "value"), PLUGIN.items())
def test_what_is_the_plugins_alone_is_not_taken_without_it(name, value):
    with pytest.raises(OptionError, match="use --backend tensorrt without --attention native"):
        EngineOptions(attention="native", **{name: value}).check(BACKENDS["tensorrt"])
    EngineOptions(attention="plugin", **{name: value}).check(BACKENDS["tensorrt"])
    with pytest.raises(OptionError, match="takes no plugins"):
        EngineOptions(attention="plugin").check(BACKENDS["tensorrt-rtx"])
