"""Files of a bundle that are none, that are swapped, or that the manifest does not name."""

import os
import subprocess
import sys

import pytest

from specbuild.runtime import Engine
from specbuild.runtime.backends.cpu.operators import register
from specbuild.runtime.backends.onnx_graph import GraphFile, open_session
from specbuild.runtime.bundle.bundle import Bundle
from specbuild.runtime.bundle.manifest import MANIFEST
from specbuild.runtime.errors import BundleError

OPEN = "import sys; from specbuild.runtime import Bundle; Bundle.open(sys.argv[1]).verify()"


def outcome(folder):
    """The last line of a process that checks a bundle, in which a hang costs ten seconds."""
    done = subprocess.run([sys.executable, "-c", OPEN, folder], capture_output=True, text=True, timeout=10)
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("name", [MANIFEST, "tokenizer.json"])
def test_a_fifo_is_refused_and_not_waited_for(bundle_copy, name):
    (bundle_copy / name).unlink()
    os.mkfifo(bundle_copy / name)
    assert outcome(bundle_copy).startswith("specbuild.runtime.errors.BundleError: ")
    with pytest.raises(BundleError, match="not a regular file"):
        Engine.load(bundle_copy)


def test_a_manifest_of_ten_gigabytes_is_refused(bundle_copy):
    os.truncate(bundle_copy / MANIFEST, 10 << 30)
    with pytest.raises(BundleError, match="more than 4 MiB"):
        Bundle.open(bundle_copy)


@pytest.mark.parametrize("name", ["target/model.onnx", "target/weights.bin", "tokenizer.json"])
def test_a_file_that_is_swapped_after_it_was_hashed_is_not_used(bundle_copy, name):
    opened = Bundle.open(bundle_copy)
    before = (bundle_copy / name).read_bytes()
    with opened.verified():
        (bundle_copy / "new").write_bytes(bytes(len(before)))
        (bundle_copy / "new").replace(bundle_copy / name)
        if name.endswith(".bin"):  # a large one was mapped before
            assert opened.map(name)[:] == before
        else:
            with pytest.raises(BundleError, match="its hash differs"):
                opened.read(name)


def test_onnx_runtime_opens_no_file_of_a_bundle(bundle_copy):
    import onnxruntime

    graph = GraphFile.of(opened := Bundle.open(bundle_copy), "target/model.onnx")
    with opened.verified():
        for path in (bundle_copy / "target").iterdir():
            path.unlink()
        register(options := onnxruntime.SessionOptions())
        open_session(graph, options, ["CPUExecutionProvider"])
