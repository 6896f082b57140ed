"""The plugin in the registry of a real TensorRT, the lean runtime's, which needs no GPU for that."""

import numpy as np
import pytest

FIELDS = "scale softcap norm_epsilon window splits processors fault inputs in_place".split()


@pytest.fixture
def trt(harness):
    lean = pytest.importorskip("tensorrt_lean", reason="needs tensorrt_lean (pip install tensorrt-lean-cu13)")
    major = str(harness.harness_major())
    if lean.__version__.split(".")[0] != major:
        pytest.skip(f"needs a tensorrt_lean of the headers' major version, {major}: this is {lean.__version__}")
    return lean


@pytest.fixture
def creator(trt, plugin_library):
    registry = trt.get_plugin_registry()
    before = len(registry.all_creators)
    library = registry.load_library(str(plugin_library))
    assert library is not None
    yield registry.get_creator("TreeAttention", "1", "specbuild")
    registry.deregister_library(library)
    assert len(registry.all_creators) == before


def create(trt, creator, fields, phase="BUILD"):
    kinds = {"f": trt.PluginFieldType.FLOAT32, "i": trt.PluginFieldType.INT32, "S": trt.PluginFieldType.CHAR}
    arrays = {name: np.atleast_1d(np.asarray(value)) for name, value in fields.items()}
    rows = [trt.PluginField(name, array, kinds[array.dtype.kind]) for name, array in arrays.items()]
    return creator.create_plugin("a layer", trt.PluginFieldCollection(rows), getattr(trt.TensorRTPhase, phase))


def test_loading_registers_the_creator_with_its_fields(trt, creator):
    assert (creator.name, creator.plugin_version, creator.plugin_namespace) == ("TreeAttention", "1", "specbuild")
    assert creator.interface_info.kind == "PLUGIN CREATOR_V3ONE"
    assert [field.name for field in creator.field_names] == FIELDS
    assert {field.name: field.type for field in creator.field_names}["in_place"] == trt.PluginFieldType.CHAR


@pytest.mark.parametrize("phase", ["BUILD", "RUNTIME"])
def test_a_plugin_has_all_capabilities(trt, creator, phase):
    plugin = create(trt, creator, {"scale": np.float32(0.125), "fault": np.int32(1)}, phase)
    kinds = trt.PluginCapabilityType
    core, build, runtime = (plugin.get_capability_interface(kind) for kind in (kinds.CORE, kinds.BUILD, kinds.RUNTIME))
    assert (core.plugin_name, core.plugin_version, core.plugin_namespace) == ("TreeAttention", "1", "specbuild")
    assert isinstance(build, trt.IPluginV3OneBuildV2)
    assert (build.interface_info.kind, build.interface_info.major) == ("PLUGIN_V3ONE_BUILD", 2)
    assert build.num_outputs == 4
    assert build.timing_cache_id == build.metadata_string
    assert build.metadata_string.startswith("scale=0.125 softcap=0 ")
    assert runtime.interface_info.kind == "PLUGIN_V3ONE_RUNTIME"
