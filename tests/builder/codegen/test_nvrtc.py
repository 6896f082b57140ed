"""Kernels compiled by NVRTC for real: what is in a cubin, its bytes, the compiler's report, and what is refused."""

import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from specbuild.builder.codegen import nvrtc
from specbuild.builder.codegen.nvrtc import SHAPES, Resources, Shape
from specbuild.builder.targets import ARCHITECTURES, HEAD_DIMS
from specbuild.runtime.backends.kernels.grids import KERNELS
from specbuild.runtime.errors import ExecutionError, OptionError

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted((ROOT / "plugins" / "kernels").glob("*.cu"))
SMALLEST = Shape(256, "BF16", "E4M3")  # the shape with the fewest kernels
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) hungry(float *x) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = x[64 * threadIdx.x + i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[64 * threadIdx.x + i] = a[i] * a[63 - i];
}
extern "C" __global__ void modest(float *x) { x[threadIdx.x] = 1.0f; }
"""
NVRTC_LOG = """ptxas info    : 165 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
ptxas         .     8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 28 registers, used 0 barriers, 8 bytes cumulative stack size
ptxas info    : Compile time = 77.197 ms
ptxas info    : Compiling entry function 'two' for 'sm_90'
ptxas info    : Function properties for two
ptxas         .     0 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 157 registers, used 1 barriers, 1120 bytes smem, 512 bytes cmem[0]
ptxas info    : Function properties for helper
ptxas         .     16 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
"""
NVCC_LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_80'
ptxas info    : Function properties for one
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 576 bytes smem, 480 bytes cmem[0]
"""
needs_nvrtc = pytest.mark.skipif(
    not any(metadata.distributions(name="nvidia-cuda-nvrtc")), reason="nvidia-cuda-nvrtc is not installed"
)


def entries(image):
    """The kernels of a cubin by its own symbol table: global functions of a 64-bit ELF file."""
    assert image[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", image, 18) == (190,)  # EM_CUDA
    (table,), (size, count) = struct.unpack_from("<Q", image, 40), struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, table + size * i) for i in range(count)]
    found = []
    for _, kind, _, _, offset, length, link, *_ in sections:
        for at in range(offset, offset + length, 24) if kind == 2 else ():
            name, info, _, section, *_ = struct.unpack_from("<IBBHQQ", image, at)
            start = sections[link][4] + name
            if info == 0x12 and section:
                found.append(image[start : image.index(0, start)].decode())
    return sorted(found)


@pytest.fixture(scope="module")
def cubins():
    return nvrtc.compile_kernels(["90"], [SMALLEST, SMALLEST])


def test_a_round_s_kernels_are_in_the_sources():
    """Those of a model without TreeAttention, for which not all sources are compiled."""
    texts = [path.read_text(encoding="utf-8") for path in nvrtc.sources()]
    text = "".join(text for text in texts if "SPECBUILD_ONE_" not in text)
    launched = {re.sub("_(F32|F16|BF16|BOOL)$", "", kernel) for kernels in KERNELS.values() for kernel in kernels}
    assert [kernel for kernel in launched if kernel not in text] == []


@pytest.mark.nightly
@needs_nvrtc
def test_a_cubin_holds_what_its_report_names(cubins):
    for cubin in cubins:
        assert entries(cubin.image) == sorted(cubin.kernels)
        assert all(0 < taken.registers <= 255 for taken in cubin.kernels.values())
    (attention,) = (cubin for cubin in cubins if cubin.name.startswith("sm_90/attention"))
    shaped = [name for name in attention.kernels if "combine" not in name]
    assert shaped == ["tree_attention_BF16_E4M3_d256_r32"]


@pytest.mark.nightly
@needs_nvrtc
def test_the_bytes_depend_on_the_sources_alone(cubins, tmp_path, monkeypatch):
    shutil.copytree(nvrtc.PLUGINS, tmp_path / "elsewhere")
    monkeypatch.setattr(nvrtc, "PLUGINS", tmp_path / "elsewhere")
    files = [tmp_path / "elsewhere" / "kernels" / name for name in ("attention.cu", "mask.cu", "walk.cu")]
    before = {cubin.name: cubin.image for cubin in cubins}
    for cubin in nvrtc.compile_kernels(["90"], [SMALLEST], files, jobs=1):
        assert cubin.image == before[cubin.name]


@needs_nvrtc
def test_one_cubin_an_architecture(tmp_path):
    (tmp_path / "modest.cu").write_text('extern "C" __global__ void modest(float *x) { x[threadIdx.x] = 1.0f; }')
    cubins = nvrtc.compile_kernels(ARCHITECTURES, SHAPES, [tmp_path / "modest.cu"])
    assert [cubin.name for cubin in cubins] == [f"sm_{name}/modest" for name in ARCHITECTURES]
    assert len({cubin.image for cubin in cubins}) == len(cubins)


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("kernels_report", ROOT / "scripts" / "gpu" / "kernels_report.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_nvrtc
@pytest.mark.parametrize(("text", "status"), [(SPILLING, 1), (SPILLING.replace("(1024, 2)", "(256)"), 0), ("?", 1)])
def test_the_report_of_all_kernels(script, tmp_path, monkeypatch, text, status):
    (tmp_path / "hungry.cu").write_text(text)
    monkeypatch.setattr(nvrtc, "sources", lambda: [tmp_path / "hungry.cu"])
    monkeypatch.setattr(sys, "argv", ["kernels_report", "--out", str(tmp_path / "a" / "report.json")])
    assert script.main() == status
    if text != "?":
        report = json.loads((tmp_path / "a" / "report.json").read_text(encoding="utf-8"))
        assert list(report["architectures"]) == [f"sm_{name}" for name in ARCHITECTURES]
        assert bool(report["spills"]) == bool(status)
    monkeypatch.setattr(sys, "argv", ["kernels_report", "--cuda-arch", "75"])
    assert script.main() == 2


@needs_nvrtc
def test_a_source_that_does_not_compile(tmp_path):
    (tmp_path / "wrong.cu").write_text('extern "C" __global__ void wrong() { nonsense(); }')
    with pytest.raises(ExecutionError, match=r'^sm_80/wrong does not compile: wrong.cu\(1\): error: .*"nonsense"'):
        nvrtc.compile_kernels(["80", "89"], [], [tmp_path / "wrong.cu"])
    (tmp_path / "wrong.cu").write_text('extern "C" __global__ void wrong() { asm("nonsense;"); }')
    with pytest.raises(ExecutionError, match=r"sm_80/wrong does not compile: .*nonsense"):
        nvrtc.compile_kernels(["80"], [], [tmp_path / "wrong.cu"])


def test_the_compilers_reports():
    assert nvrtc.parse_report(NVCC_LOG) == {"one": Resources(40, 0, 0, 0, 576)}
    two = Resources(157, 16, 5, 14, 1120)  # what it calls included
    assert nvrtc.parse_report(NVRTC_LOG) == {"one": Resources(28, 8, 0, 0, 0), "two": two}
    for log in ("", NVCC_LOG.replace("Used", "Took"), NVCC_LOG.replace("spill", "split")):
        with pytest.raises(ExecutionError, match="another version of NVRTC"):
            nvrtc.parse_report(log)


def test_a_shape_is_one_of_the_kernels():
    assert str(Shape(64, "F16", "F16")) == "F16_F16_d64"
    with pytest.raises(OptionError, match=r"^head size 72: TreeAttention has 64, 80, 96, 128 and 256$"):
        Shape(72, "BF16", "BF16")
    for dtype, cache in (("F32", "F32"), ("BF16", "F16")):
        with pytest.raises(OptionError, match=f"^{dtype} with a cache of {cache}: TreeAttention has F16 with F16, F16"):
            Shape(64, dtype, cache)
    text = "".join(path.read_text(encoding="utf-8") for path in (nvrtc.PLUGINS / "kernels").iterdir())
    assert all(f"EACH_ROWS(X, T, C, {size})" in text or f"X(T, C, {size}, " in text for size in HEAD_DIMS)


def test_without_nvrtc_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for ask in (nvrtc.compiler_version, lambda: nvrtc.check_compiler(["80"])):
        with pytest.raises(OptionError, match=r"needs NVRTC.*pip install 'specbuild-trt\[cuda\]'"):
            ask()


def test_an_older_nvrtc_is_told_apart(monkeypatch):
    older = SimpleNamespace(nvrtcVersion=lambda: (0, 12, 4), nvrtcGetSupportedArchs=lambda: (0, [75, 80, 90]))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(nvrtc=older))
    nvrtc.check_compiler(["80", "90"])
    with pytest.raises(OptionError, match=r"NVRTC 12\.4 does not know sm_110"):
        nvrtc.check_compiler(["80", "110"])


def test_an_installation_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "PLUGINS", tmp_path)
    with pytest.raises(ExecutionError, match="has no kernels: install specbuild again"):
        nvrtc.sources()


@pytest.mark.nightly(but=("options0-0-nothing to compile",))
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ([], 0, "no CUDA kernels"),
        (["-DSPECBUILD_TENSORRT=ON", "-DTensorRT_ROOT=/nonexistent", "-DCMAKE_CUDA_ARCHITECTURES=80"], 1, "NvInfer"),
    ],
)
def test_cmake_says_what_it_does(tmp_path, options, status, words):
    if options and not shutil.which("nvcc"):
        pytest.skip("nvcc is not installed")
    done = subprocess.run(["cmake", "-S", ROOT, "-B", tmp_path, *options], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert words in done.stdout + done.stderr


KEPT = {"nvcc's own": ("walk",), "90": ("walk", "attention")}  # sources that are not for the soak


@pytest.mark.slow(only=("90-walk", "nvcc's own-walk"))
@pytest.mark.soak(only=[f"{by}-{each.stem}" for by, kept in KEPT.items() for each in SOURCES if each.stem not in kept])
@pytest.mark.nightly(but=("90-walk", "nvcc's own-walk"))
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
@pytest.mark.parametrize("architecture", [[], ["-arch=sm_90"]], ids=["nvcc's own", "90"])
def test_each_source_compiles_alone(source, architecture, tmp_path):
    command = ["nvcc", "-std=c++17", f"-I{ROOT / 'plugins'}", *architecture, "-Xcicc", "-O0", "-Xptxas", "-O0"]
    done = subprocess.run(
        [*command, *SMALLEST.macros, "-c", source, "-o", tmp_path / "o"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
