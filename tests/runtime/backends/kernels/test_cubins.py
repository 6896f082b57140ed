"""Kernels in a bundle's cubins: which of them a device runs, what is missing, and that they run on a GPU."""

import ctypes
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
from calls import ints, walk
from choosing import rows, simple
from device import CudaKernels, gpus, take_gpu

from specbuild.builder.codegen import nvrtc as compiler
from specbuild.builder.targets import architectures
from specbuild.runtime.backends.kernels import cubins
from specbuild.runtime.backends.kernels.abi import STRUCTS, KernelLibrary
from specbuild.runtime.backends.kernels.cubins import CubinKernels, best_architecture, find_kernels
from specbuild.runtime.backends.kernels.grids import KERNELS
from specbuild.runtime.bundle.manifest import KernelRecord
from specbuild.runtime.errors import ExecutionError
from specbuild.runtime.sampling.sampler import SamplingParams

needs_nvrtc = pytest.mark.skipif(
    not any(metadata.distributions(name="nvidia-cuda-nvrtc")), reason="nvidia-cuda-nvrtc is not installed"
)


@pytest.mark.parametrize(
    ("compiled", "device", "best"),
    [
        (("80", "86", "90a"), "90", "90a"),  # of a bundle built before there was "90"
        (("80", "86", "90"), "90", "90"),
        (("90a",), "89", None),
        (("100a",), "103", None),
        (("100",), "103", "100"),
        (("100",), "110", None),
        (("120",), "121", "120"),
        (("80", "86", "87"), "89", "86"),
        (("87", "80"), "87", "87"),
        ((), "80", None),
        (("", "a", "x1"), "80", None),
    ],
)
def test_binary_compatibility(compiled, device, best):
    assert best_architecture(compiled, device) == best


def records(*without):
    """A manifest's, a file a launcher."""
    return {
        f"kernels/sm_90/{name}.cubin": KernelRecord("90", [kernel for kernel in kernels if kernel not in without])
        for name, kernels in KERNELS.items()
    }


def test_a_bundle_built_before_is_found(tmp_path):
    """Its kernels of "90a" are a 9.0's, for one is missed by its name alone."""
    old = {file: KernelRecord("90a", record.kernels) for file, record in records("publish", "walk_tree").items()}
    with pytest.raises(ExecutionError, match="no kernel walk_tree for compute capability 90"):
        find_kernels(bundle(tmp_path, old), "90")


@pytest.mark.skipif(gpus() > 0, reason="needs a machine without a GPU")
def test_without_a_driver(tmp_path):
    with pytest.raises(ExecutionError, match=r"needs NVIDIA's driver|cuda-bindings|does not start"):
        find_kernels(bundle(tmp_path, records()), "90")


def bundle(folder, kernels):
    """Of a bundle, what `find_kernels` looks at."""
    return SimpleNamespace(
        folder=folder, manifest=SimpleNamespace(kernels=kernels), read=lambda name: (folder / name).read_bytes()
    )


def test_the_installed_library_comes_second(tmp_path, host, monkeypatch):
    monkeypatch.setattr(cubins, "find_library", lambda: host.path)
    found = find_kernels(bundle(tmp_path, records()), "86")
    assert isinstance(found, KernelLibrary)
    assert found.path == host.path
    monkeypatch.setattr(cubins, "find_library", lambda: None)
    with pytest.raises(ExecutionError, match=r"--cuda-arch 86`, or .*SPECBUILD_CUDA=1 pip install"):
        find_kernels(bundle(tmp_path, records()), "86")


@needs_nvrtc
def test_the_compiler_lays_structs_out_the_same(tmp_path):
    """A cubin's parameters are the structs' bytes."""
    holds = [f"sizeof(specbuild_{name}) == {ctypes.sizeof(kind)}" for name, kind in STRUCTS.items()]
    for name, kind in STRUCTS.items():
        for field, *_ in kind._fields_:
            holds.append(f"__builtin_offsetof(specbuild_{name}, {field}) == {getattr(kind, field).offset}")
    lines = [f'static_assert({each}, "");' for each in holds]
    source = tmp_path / "sizes.cu"
    source.write_text('#include "kernels.h"\n' + "\n".join(lines) + '\nextern "C" __global__ void sizes() {}\n')
    assert "sizes" in compiler.compile_source(source, "90").kernels


@pytest.fixture(scope="module")
def cubin_kernels(tmp_path_factory):
    """Compiled for this GPU and loaded, as from a bundle."""
    capability, folder = take_gpu(), tmp_path_factory.mktemp("cubins")
    (name,) = architectures([capability])
    wanted = {"choose", "walk", "commit", "mask", "grow", "publish"}
    made = {}
    for cubin in compiler.compile_kernels([name], [], [path for path in compiler.sources() if path.stem in wanted]):
        file = folder / f"{cubin.name.replace('/', '-')}.cubin"
        file.write_bytes(cubin.image)
        made[file.name] = KernelRecord(name, sorted(cubin.kernels))
    found = find_kernels(bundle(folder, made), capability)
    assert isinstance(found, CubinKernels)
    return found


@needs_nvrtc
@pytest.mark.gpu
@pytest.mark.skipif(not gpus(), reason="needs an NVIDIA GPU and its driver")
def test_cubins_on_a_gpu(cubin_kernels):
    """A choice with cut-offs over a large vocabulary, and a walk."""
    kernels = CudaKernels(cubin_kernels)
    logits = np.random.default_rng(0).normal(0, 4, 1 << 19)
    choices, _ = simple(kernels, rows(logits), SamplingParams(temperature=0.01, top_k=5), 1)
    assert choices[0, 0, 0] == logits.astype(np.float32).argmax()
    out = walk(kernels, ints([[5, 6, 7]]), None, ints([[6, 9, 1]]))
    assert out["emitted"].tolist() == [[6, 9, -1]]
    assert out["pair"].tolist() == [[6, 9]]
