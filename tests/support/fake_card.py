"""A stand-in for CUDA's driver (tests/support/card), under which a further process finds a GPU on this machine."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parent
CARD = SUPPORT / "card"
SITE = CARD / "site"  # Python's modules that execute models on it
ROOT = SUPPORT.parents[1]
PLUGINS = ROOT / "plugins"
KERNELS = "libspecbuild_kernels.so"
COMMAND = "from specbuild.cli import main; main()"
SMALL = ("--max-seq-len=192", "--max-batch-size=2", "--buckets=1,2,4,8", "--no-tune", "--cuda-arch=90")
BUNDLES = {
    "onnxruntime-cuda": ("--precision=fp32",),
    "onnxruntime-cuda, TreeAttention": ("--precision=fp16",),
    "tensorrt-rtx": ("--precision=fp16", "--prompt-chunk=64"),
}
HEADERS = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
HEADERS += [Path(folder) / "nvidia" / "cu13" / "include" for folder in sys.path]


def find_header():
    """The folder of CUDA's cuda.h, of a toolkit or of a package."""
    return next((folder for folder in HEADERS if (folder / "cuda.h").exists()), None)


def build(folder, kernels, header):
    """In `folder` the driver, and beside it the kernels' library, of objects compiled for the host."""
    folder.mkdir()
    compiler = ["g++", "-std=c++17", "-O1", "-fPIC", f"-I{SUPPORT}"]
    known = [
        *compiler,
        "-DSPECBUILD_HOST",
        f"-I{PLUGINS}",
        "-c",
        str(CARD / "known.cpp"),
        "-o",
        str(folder / "known.o"),
    ]
    jobs = [subprocess.Popen(known)]
    for source in (path for path in CARD.glob("*.cpp") if path.stem != "known"):
        out = folder / f"{source.stem}.card.o"
        jobs.append(subprocess.Popen([*compiler, f"-I{header}", "-c", str(source), "-o", str(out)]))
    failed = [job.wait() for job in jobs]  # every one, so that none is left running
    assert not any(failed)
    link(folder / "libcuda.so.1", folder.glob("*.card.o"), "-Wl,-soname,libcuda.so.1", "-Wl,-z,defs", "-pthread")
    link(folder / KERNELS, [*kernels, folder / "known.o"])


def link(library, objects, *flags):
    """A shared library of objects."""
    subprocess.run(["g++", "-shared", *flags, *map(str, objects), "-ldl", "-o", str(library)], check=True)


def environment(folder):
    """A process's environment, in which the driver in `folder` is the machine's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    libraries = [str(folder), *filter(None, [kept.get("LD_LIBRARY_PATH")])]
    paths = [str(CARD / "bin"), kept.get("PATH", os.defpath)]
    modules = [str(SITE), *filter(None, [kept.get("PYTHONPATH")])]
    found = {"PYTHONPATH": os.pathsep.join(modules)}
    found |= {"LD_LIBRARY_PATH": os.pathsep.join(libraries), "PATH": os.pathsep.join(paths)}
    return kept | found | {"SPECBUILD_KERNELS": str(folder / KERNELS)}


@pytest.fixture(scope="session")
def card(once, host):
    """The environment of a process that is to find the stand-in."""
    header = find_header() or pytest.skip("needs CUDA's header, cuda.h")
    assert shutil.which("g++")
    kernels = sorted(host.path.parent.glob("*.o"))
    return environment(once("card", lambda folder: build(folder, kernels, header)))


def build_on(card, bundle, *options):
    """Build a bundle in a process that finds the stand-in, and return what was printed."""
    command = [sys.executable, "-c", COMMAND, "build", *options, *SMALL, f"--output={bundle}"]
    done = subprocess.run(command, env=card, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return done.stdout


@pytest.fixture(scope="session")
def card_bundle(card, pair, once):
    """`card_bundle(backend)`: the reference pair's, with cubins for the stand-in; built and checked on it, once."""

    def make(backend, folder):
        folder.mkdir()
        options = f"--draft={pair / 'draft'}", f"--backend={backend.partition(',')[0]}", *BUNDLES[backend]
        printed = build_on(card, folder / "card.bundle", f"--target={pair / 'target'}", *options)
        assert printed.count("default tree against plain decoding: 192 tokens equal") == 2, printed

    return lambda backend: once(f"card-{backend}", lambda folder: make(backend, folder)) / "card.bundle"


def run(card, folder, *arguments):
    """The last line of a run of pytest under the stand-in; every test passed, and none was skipped."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs"]
    places = [each if each.startswith("-") else str(SUPPORT.parent / each) for each in arguments]
    done = subprocess.run(
        [*command, f"--basetemp={folder / 'run'}", *places], cwd=ROOT, env=card, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:2000] + done.stdout[-6000:]
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"\d+ passed(, \d+ deselected)?(, \d+ warnings?)? in .*", last), done.stdout[-3000:]
    return last
