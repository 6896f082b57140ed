"""Loading on a GPU refuses the first thing that is wrong, in the promised order, and leaves nothing on the device."""

import importlib.util
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from host_device import HostDevice

from specbuild.runtime import Bundle
from specbuild.runtime.backends import placement
from specbuild.runtime.backends.kernels import cubins
from specbuild.runtime.backends.kernels.grids import KERNELS
from specbuild.runtime.backends.tensorrt.plan import flavour
from specbuild.runtime.bundle import memory_plan
from specbuild.runtime.bundle.backend import BACKENDS, COMPILED
from specbuild.runtime.bundle.manifest import EngineRecord, KernelRecord
from specbuild.runtime.engine.composition import compose
from specbuild.runtime.engine.load_options import LoadOptions
from specbuild.runtime.errors import BundleError, ExecutionError, OptionError

RTX = "tensorrt-rtx"
needs_rtx = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs tensorrt-rtx")


def installed():
    return str(flavour(BACKENDS[RTX]).__version__) if importlib.util.find_spec("tensorrt_rtx") else "1.7.1.116"


@pytest.fixture
def make(manifest_of, write_bundle, tmp_path):
    """`make(backend, engine fields, **manifest fields)`: a bundle of two models, whose plans are none."""

    def make(backend=RTX, engine=None, **fields):
        file = "model.plan" if backend in COMPILED else "model.onnx"
        graphs = {name: {"graphs": {"2": f"{name}/{file}"}, "precision": "fp16"} for name in ("target", "draft")}
        record = EngineRecord(installed(), ["89"], "native", None, False, None, 0, {"n": {"nodes": [1, 8, 8]}})
        records = {f"{name}/{file}": replace(record, **engine or {}) for name in graphs} if backend in COMPILED else {}
        return write_bundle(
            tmp_path / "x.bundle", manifest_of(**graphs, **{"backend": backend, "engines": records} | fields)
        )

    return make


class Pretended(HostDevice):
    """A GPU of which only that is true which is asked before it runs anything."""

    def __init__(self, capability, free, closing):
        super().__init__()
        self.capability, self.memory, self._closing = capability, (free, free), closing
        self.closed = self.entered = 0

    @property
    def current(self):
        @contextmanager
        def enter():
            self.entered += 1
            yield

        return enter()

    def close(self):
        self.closed += 1
        if self._closing:
            raise self._closing


@pytest.fixture
def pretend(monkeypatch):
    """`pretend(capability, free, closing)`: from now on there is such a GPU; those that were opened."""

    def make(capability="89", free=1 << 40, closing=None):
        opened = list[Pretended]()

        def cuda():
            opened.append(Pretended(capability, free, closing))
            return opened[-1]

        monkeypatch.setattr(placement, "Cuda", cuda)
        return opened

    return make


def refused(kind, bundle, **options):
    """The one line with which a bundle is refused."""
    with pytest.raises(kind) as caught:
        compose(bundle, LoadOptions(**{"batch_size": 2} | options))
    assert type(caught.value) is kind
    return str(caught.value)


def test_a_damaged_file_is_said_before_anything_is_asked_for(make):
    """A driver too: what is damaged may hold code."""
    bundle = make("onnxruntime-cuda")
    path = bundle.path("draft/model.onnx")
    path.write_bytes(path.read_bytes()[::-1])
    assert "(its hash differs): copy the bundle again" in refused(BundleError, bundle)
    path.unlink()
    assert f"{path} cannot be read" in refused(BundleError, bundle)


@pytest.mark.parametrize("backend", sorted(COMPILED))
def test_a_tensorrt_that_is_missing_is_said_before_the_driver(make, monkeypatch, backend):
    monkeypatch.setitem(sys.modules, str(BACKENDS[backend].package), None)
    line = refused(BundleError, make(backend))
    assert line.startswith(f"the bundle needs {backend} (")
    assert line.endswith(f"): pip install {backend}")


@needs_rtx
def test_kernels_of_a_bundle_have_to_be_whole(make, pretend):
    """Of those for this GPU one that a loop launches is missing; the first error is what is said of it."""
    kernels = sorted({kernel for names in KERNELS.values() for kernel in names} - {"walk_tree"})
    opened = pretend(closing=ExecutionError("the context is lost"))
    line = refused(ExecutionError, make(kernels={"kernels/sm_89.cubin": KernelRecord("89", kernels)}))
    assert "has no kernel walk_tree for compute capability 89: build it again with --cuda-arch 89" in line
    assert (opened[0].closed, opened[0].entered) == (1, 1), "kernels are loaded in the device's context"


@needs_rtx
@pytest.mark.parametrize(
    ("engine", "message"),
    [({"block_size": 16}, "the plan's attention is native over pages"), ({}, "does not load in tensorrt-rtx")],
)
def test_plans_that_are_none_are_refused(make, pretend, monkeypatch, engine, message):
    monkeypatch.setattr(cubins, "find_kernels", lambda *_: SimpleNamespace())  # none is launched
    opened = pretend()
    assert message in refused(BundleError, make(engine=engine))
    assert opened[0].closed == 1


@needs_rtx
def test_faults_are_said_in_the_promised_order(make, pretend):
    """Files, TensorRT, the GPU it is for, memory, kernels; each once those before it are mended."""
    bundle = make(engine={"attention": "paged", "architectures": ["86"]})
    engines = {name: replace(engine, version="1.2.0.54") for name, engine in bundle.manifest.engines.items()}
    older, path = Bundle(bundle.folder, replace(bundle.manifest, engines=engines)), bundle.path("tokenizer.json")
    content = path.read_bytes()
    path.write_bytes(b"changed")
    opened = pretend(free=0)
    assert "tokenizer.json is not what was built" in refused(BundleError, older)
    path.write_bytes(content)
    assert "compiled by tensorrt-rtx 1.2.0.54" in refused(BundleError, older)
    assert opened == [], "until here no GPU is touched"
    assert "compiled for sm_86, this GPU is sm_89" in refused(BundleError, bundle)
    pretend("86", free=0)
    assert "0 MiB are free" in refused(OptionError, bundle)
    pretend("86")
    assert "has no kernels for compute capability 86" in refused(ExecutionError, bundle)


def test_an_interrupt_frees_the_device_too(make, pretend, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cubins, "find_kernels", interrupt)
    opened = pretend()
    with pytest.raises(KeyboardInterrupt):
        compose(make("onnxruntime-cuda"), LoadOptions())
    assert opened[0].closed == 1


def test_kernels_are_launched_in_the_device_s_context():
    device, seen = Pretended("89", 0, None), list[tuple[Any, ...]]()
    kernels = SimpleNamespace(launch=lambda *given: seen.append((device.entered, *given)), workspace=len)
    wrapped, params = placement.ContextKernels(kernels, device), "params"
    wrapped.launch("walk_tree", params, 7)
    assert (seen, wrapped.workspace(params)) == ([(1, "walk_tree", params, 7)], 6)


@needs_rtx
@pytest.mark.parametrize(
    ("engine", "planned", "least"),
    [
        ({}, {"models": ["target"]}, {"drafter": "ngram"}),
        ({}, {"batch_size": 1}, {"batch_size": 1}),
        ({"attention": "plugin", "plugin": "1", "block_size": 16}, {"tokens": 64}, {"kv_cache_tokens": 64}),
        ({}, {}, {"gpu_weights_percent": 0.5}),
    ],
)
def test_what_an_option_leaves_out_needs_no_room(make, write_bundle, pretend, engine, planned, least):
    bundle = make(engine=engine)
    bundle = write_bundle(bundle.folder, bundle.manifest, {"target/model.plan": bytes(1 << 20)})
    free = memory_plan.plan(bundle.manifest, **{"batch_size": 2} | planned).total
    pretend(free=free if planned else free - (1 << 19))
    assert "MiB are free" in refused(OptionError, bundle)
    assert "has no kernels" in refused(ExecutionError, bundle, **least)
