"""The kernels' own source, compiled for the host, and kept until it changes."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from device import GPU, CudaKernels, HostKernels
from made_once import made_once

from specbuild.runtime.backends.kernels.abi import KernelLibrary
from specbuild.runtime.backends.kernels.library import find_library

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
HOST = Path(__file__).resolve().parent / "host"
LIBRARY = "libspecbuild_host.so"
KEPT = PLUGINS.parent / "build" / "host-kernels"
FLAGS = [
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fPIC",
    "-Wno-unknown-pragmas",
    "-DSPECBUILD_HOST",
    f"-I{PLUGINS}",
    f"-I{HOST.parent}",
]


def name_of(compiler, flags):
    """A name that changes with the kernels' sources, the host's, the flags and the compiler."""
    told = [subprocess.check_output([compiler, "--version"]), *(flag.encode() for flag in (*FLAGS, *flags))]
    sources = sorted([*PLUGINS.glob("*.h"), *(PLUGINS / "kernels").iterdir(), *HOST.iterdir()])
    parts = [*told, *(part for path in sources for part in (path.name.encode(), path.read_bytes()))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


@pytest.fixture(scope="session")
def compile_host():
    """`compile_host(*flags)`: the library, every source compiled by g++; kept in build/ for later runs."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    KEPT.mkdir(parents=True, exist_ok=True)

    # A process of tests keeps to one core; others wait for this.
    spread = ["taskset", "-a", "-c", f"0-{(os.cpu_count() or 1) - 1}"] if shutil.which("taskset") else []

    def compile_all(folder, flags):
        folder.mkdir()
        sources = [*sorted((PLUGINS / "kernels").glob("*.cu")), HOST / "host.cpp"]
        objects = [folder / f"{source.stem}.o" for source in sources]
        jobs = [
            subprocess.Popen([*spread, compiler, *FLAGS, *flags, "-x", "c++", "-c", str(source), "-o", str(out)])
            for source, out in zip(sources, objects, strict=True)
        ]
        failed = [job.wait() for job in jobs]  # every one, so that none is left running
        assert not any(failed)
        subprocess.run([compiler, "-shared", *map(str, objects), "-o", str(folder / LIBRARY)], check=True)

    def make(*flags):
        name = name_of(compiler, flags)
        return KernelLibrary(made_once(KEPT, name, lambda folder: compile_all(folder, flags)) / LIBRARY)

    return make


@pytest.fixture(scope="session")
def host(compile_host):
    """The kernels, run on this machine's CPU."""
    return compile_host()


@pytest.fixture(scope="session")
def host_kernels(host):
    """The same, with arrays for arguments."""
    return HostKernels(host)


@pytest.fixture(scope="session")
def cuda_kernels(tmp_path_factory):
    """The kernels on this machine's GPU: those in $SPECBUILD_KERNELS, the installed ones, or compiled for it."""
    library = Path(os.environ["SPECBUILD_KERNELS"]) if "SPECBUILD_KERNELS" in os.environ else find_library()
    if library is None:
        compiler = shutil.which("nvcc") or pytest.skip("needs nvcc, or an installation with SPECBUILD_CUDA=1")
        library = tmp_path_factory.mktemp("cuda") / "libspecbuild_kernels.so"
        flags = ["-std=c++17", "-O3", "-arch=native", "-Xcompiler", "-fPIC", "-shared", f"-I{PLUGINS}"]
        subprocess.run(
            [compiler, *flags, *map(str, (PLUGINS / "kernels").glob("*.cu")), "-o", str(library)], check=True
        )
    return CudaKernels(KernelLibrary(library))


@pytest.fixture(scope="session", params=["host", *GPU])
def kernels(request):
    """The kernels on the host, and on a GPU where there is one."""
    found = request.getfixturevalue(f"{request.param}_kernels")
    return found


@pytest.fixture(scope="session")
def in_order():
    """`with in_order(library, seed)`: threads take turns, and copies are done, in another order (host/host.h)."""

    @contextmanager
    def order(library, seed):
        set_order = ctypes.CDLL(str(library.path)).specbuild_host_order
        set_order(seed)
        try:
            yield
        finally:
            set_order(0)

    return order
