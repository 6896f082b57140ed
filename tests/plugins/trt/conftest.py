"""The TensorRT plugin compiled with the kernels for this CPU, and `Plugin`: what TensorRT would call, by ctypes."""

import ctypes
import os
import shutil
import subprocess
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbuild.runtime.backends.kernels.abi import Attention

ROOT = "TensorRT_ROOT"  # as CMake spells it
PLUGINS = Path(__file__).resolve().parents[3] / "plugins"
EMULATOR = Path(__file__).resolve().parents[2] / "support" / "host" / "host.cpp"
HOST = ["-w", "-ffp-contract=off", "-DSPECBUILD_HOST", "-DSPECBUILD_ONE_HEAD_DIM=64", "-x", "c++"]
ONE = [*HOST, "-DSPECBUILD_ONE_DTYPE=F16", "-DSPECBUILD_ONE_CACHE_DTYPE=F16"]
TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "float8_e4m3fn": 6, "bfloat16": 7}  # nvinfer1::DataType


class Field(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("data", c_void_p), ("type", c_int32), ("length", c_int32)]


class Fields(ctypes.Structure):
    _fields_ = [("count", c_int32), ("fields", POINTER(Field))]


class Dims(ctypes.Structure):
    _fields_ = [("rank", c_int32), ("sizes", c_int64 * 8)]


class Desc(ctypes.Structure):
    _fields_ = [("dims", Dims), ("type", c_int32), ("format", c_int32), ("scale", c_float)]


class DynamicDesc(ctypes.Structure):
    _fields_ = [("desc", Desc), ("min", Dims), ("max", Dims), ("opt", Dims)]


def _dims(shape):
    return Dims(len(shape), (c_int64 * 8)(*shape))


def _dynamic(tensors, layout=0):
    rows = [(_dims(shape), TYPES[dtype]) for shape, dtype in tensors]
    return (DynamicDesc * len(rows))(*[DynamicDesc(Desc(d, t, layout, -1.0), d, d, d) for d, t in rows])


def _addresses(values):
    return (c_void_p * len(values))(*[value.ctypes.data for value in values])


class Plugin:
    """A plugin made of fields, or of a handle. Tensors are pairs of a shape and the name of a type, inputs first."""

    def __init__(self, library, phase, fields, handle=None):
        self.library, self.keep = library, list[Any]()
        if fields is not None:
            rows = [self._field(name, value) for name, value in fields.items()]
            handle = library.harness_create(byref(Fields(len(rows), (Field * len(rows))(*rows))), phase)
        self.handle = c_void_p(handle)

    def _field(self, name, value):
        kind, array = 5, np.atleast_1d(np.asarray(value))
        if isinstance(value, str):
            kind, array = 6, np.frombuffer(value.encode(), np.uint8)
        elif array.dtype.kind == "f":
            kind, array = 1, array.astype(np.float32)
        else:
            array = array.astype(np.int32)
        self.keep.append(array)
        return Field(name.encode(), array.ctypes.data, kind, array.size)

    def call(self, name, *arguments):
        return getattr(self.library, f"harness_{name}")(self.handle, *arguments)

    def log(self):
        return str(self.library.harness_log().decode()).replace("specbuild::TreeAttention: ", "")

    def fields(self):
        found = self.call("fields").contents
        values = {}
        for field in found.fields[: found.count]:
            raw = ctypes.string_at(field.data, field.length * (1 if field.type == 6 else 4))
            value = raw.decode() if field.type == 6 else np.frombuffer(raw, "f4" if field.type == 1 else "i4")[0]
            values[field.name.decode()] = value
        return values

    def shapes(self, shapes, outputs=3):
        out = (Dims * outputs)()
        given = (Dims * len(shapes))(*[_dims(shape) for shape in shapes])
        if self.call("shapes", given, len(shapes), out, outputs):
            return None
        return [tuple(each.sizes[: each.rank]) for each in out]

    def types(self, types, outputs=3):
        out = (c_int32 * outputs)()
        if self.call("types", (c_int32 * len(types))(*[TYPES[t] for t in types]), len(types), out, outputs):
            return None
        return [list(TYPES)[list(TYPES.values()).index(each)] for each in out]

    def supports(self, position, types, outputs=3, layout=0):
        described = _dynamic([((1,), each) for each in types], layout)
        return bool(self.call("supports", position, described, len(types) - outputs, outputs))

    def configure(self, tensors, outputs=3):
        return int(self.call("configure", _dynamic(tensors), len(tensors) - outputs, outputs))

    def workspace(self, tensors, outputs=3):
        return int(self.call("workspace", _dynamic(tensors), len(tensors) - outputs, outputs))

    def shape_change(self, tensors, outputs=3):
        described = (Desc * len(tensors))(*[each.desc for each in _dynamic(tensors)])
        return int(self.call("shape_change", described, len(tensors) - outputs, outputs))

    def enqueue(self, inputs, outputs, workspace=None):
        described = _dynamic([(each.shape, each.dtype.name) for each in [*inputs, *outputs]])
        described = (Desc * len(described))(*[each.desc for each in described])
        scratch = c_void_p(None if workspace is None else workspace.ctypes.data)
        return int(self.call("enqueue", described, len(inputs), _addresses(inputs), _addresses(outputs), scratch))


@pytest.fixture(scope="session")
def tensorrt_root():
    if ROOT not in os.environ:
        pytest.skip(f"needs TensorRT's headers: set {ROOT} to the folder that has them in include/")
    return Path(os.environ[ROOT])


@pytest.fixture(scope="session")
def plugin_library(tensorrt_root, tmp_path_factory):
    """The plugin, the kernels for this CPU and the harness in one library."""
    cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    if not (cuda / "cuda_runtime_api.h").exists():
        pytest.skip("needs the headers of CUDA's runtime: set CUDA_HOME")
    folder = tmp_path_factory.mktemp("trt")
    headers = ["-isystem", str(tensorrt_root / "include"), "-isystem", str(cuda), "-Wall", "-Wextra", "-Werror"]
    sources = [(source, [*headers, "-fvisibility=hidden"]) for source in sorted((PLUGINS / "trt").glob("*.cpp"))]
    sources += [(Path(__file__).with_name("harness.cpp"), headers)]
    sources += [(PLUGINS / "kernels" / name, ONE) for name in ("attention.cu", "error.cu")] + [(EMULATOR, ONE)]
    objects = []
    for source, flags in sources:
        objects.append(str(folder / f"{source.stem}.o"))
        command = [
            "g++",
            "-std=c++17",
            "-O1",
            "-fPIC",
            f"-I{PLUGINS}",
            f"-I{EMULATOR.parents[1]}",
            *flags,
            "-c",
            str(source),
            "-o",
            objects[-1],
        ]
        subprocess.run(command, check=True)
    library = folder / "libspecbuild_trt.so"
    flags = ["-shared", "-Wl,--no-undefined,--wrap=specbuild_tree_attention"]
    subprocess.run(["g++", *objects, *flags, "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="session")
def harness(plugin_library):
    # A copy: TensorRT's registry lends its own log to the library that it loads.
    library = ctypes.CDLL(str(shutil.copy(plugin_library, plugin_library.with_name("libharness.so"))))
    for name in ("harness_create", "harness_clone", "harness_attach"):
        getattr(library, name).restype = c_void_p
    for name in ("harness_log", "harness_metadata", "harness_timing_id", "specbuild_error"):
        getattr(library, name).restype = c_char_p
    library.harness_fields.restype = POINTER(Fields)
    library.harness_launched.restype = POINTER(Attention)
    library.harness_supports.restype = ctypes.c_bool
    library.harness_workspace.restype = library.specbuild_attention_workspace.restype = c_size_t
    return library


@pytest.fixture
def make(harness):
    """`make(**fields)`: the plugin for a build on a device of `processors` multiprocessors, by default of none."""
    made = []

    def make(of=None, how="", device=0, runtime=False, **fields):
        if of:
            made.append(Plugin(harness, 1, None, of.call(how)))
            return made[-1]
        harness.harness_start(device)
        harness.harness_log()
        made.append(Plugin(harness, int(runtime), fields))
        return made[-1]

    yield make
    for plugin in made:
        if plugin.handle:
            plugin.call("free")
