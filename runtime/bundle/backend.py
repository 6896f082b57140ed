"""The backends that a bundle can be built for and run by: a descriptor of each, which builder and runtime consult.

No code compares a backend's name: whatever differs between backends is a field here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from specbuild.runtime.errors import BundleError

FLOATS = ("fp32", "fp16", "bf16")  # precisions without quantization
RTX_ARCHITECTURES = ("75", "80", "86", "89", "120", "121")  # compute capabilities that TensorRT-RTX compiles for
COMPATIBLE = ("80", "90", "100", "120")  # every GPU from 8.0 on runs one of them, except 8.7 and 11.0


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend: how models are built for it, where they run, and what it can do."""

    name: str
    device: Literal["cpu", "gpu"]  # the folder of `runtime.backends` with its executor
    lowering: str  # the module of `builder.lower` that lowers for it
    precisions: tuple[str, ...]  # weight precisions; the default first
    dtypes: tuple[str, ...]  # in which everything but quantized weights is computed; the default first
    bound: float = 1e-4  # in logits: two float32 computations may choose differently if the gap is smaller
    package: str | None = None  # the Python module that compiles and runs its engines; None: it runs graphs
    provider: str | None = None  # ONNX Runtime's execution provider; None: it does not use ONNX Runtime
    blocks: bool = False  # whether specbuild's own products run, of weights in blocks of any form
    native_lowering: str | None = None  # the module that lowers without the plugin; None: it takes no plugins
    architectures: tuple[str, ...] = ()  # engines can be compiled for these; (): only for the compiling GPU
    cubins: tuple[str, ...] = ()  # default architectures to compile kernels for
    load_options: frozenset[str] = frozenset()  # those `LoadOptions` that only some backends have
    compiles_here: bool = True  # whether models can be compiled on machines without a GPU

    @property
    def on_gpu(self) -> bool:
        """Return whether bundles run on a GPU."""
        return self.device == "gpu"

    @property
    def compiles(self) -> bool:
        """Return whether a model is compiled into an engine, which can stream weights, not run as a graph."""
        return self.package is not None

    @property
    def times_kernels(self) -> bool:
        """Return whether its compiler times kernels on a GPU, and so has options for timing and GPU compatibility."""
        return self.compiles and not self.compiles_here

    @property
    def takes_plugins(self) -> bool:
        """Return whether attention can be TreeAttention; in engines it alone has pages and FP8 caches."""
        return self.native_lowering is not None

    @property
    def quantizes(self) -> bool:
        """Return whether weights can be quantized."""
        return any(each not in FLOATS for each in self.precisions)


_QUANTIZED = "int8", "int4", "fp8"
_RESIDENT = frozenset({"resident"})
_STREAMED = _RESIDENT | {"gpu_weights_percent"}
BACKENDS: Mapping[str, Backend] = {
    each.name: each
    for each in (
        Backend(
            "onnxruntime",
            device="cpu",
            lowering="onnxruntime",
            precisions=("fp32", "int8", "int4", "keep"),
            dtypes=("fp32",),
            blocks=True,
            provider="CPUExecutionProvider",
            load_options=frozenset({"threads", "max_num_batched_tokens"}),
        ),
        Backend(
            "onnxruntime-cuda",
            device="gpu",
            lowering="parts",
            native_lowering="standard",
            precisions=("fp16", "bf16", "fp32", "int8", "int4", "keep"),
            dtypes=("fp16", "bf16"),
            blocks=True,
            provider="CUDAExecutionProvider",
            cubins=COMPATIBLE,
            load_options=_RESIDENT,
        ),
        Backend(
            "tensorrt",
            device="gpu",
            lowering="plugin",
            native_lowering="standard",
            precisions=("fp16", "bf16", "fp32", *_QUANTIZED),
            dtypes=("fp16", "bf16"),
            package="tensorrt",
            cubins=COMPATIBLE,
            load_options=_STREAMED,
            compiles_here=False,
        ),
        Backend(
            "tensorrt-rtx",
            device="gpu",
            lowering="standard",
            precisions=("fp16", "bf16", "fp32", *_QUANTIZED),
            dtypes=("fp16", "bf16"),
            package="tensorrt_rtx",
            architectures=RTX_ARCHITECTURES,
            cubins=("80", "120"),
            load_options=_STREAMED,
        ),
    )
}
DEFAULT = "onnxruntime"
COMPILED = tuple(name for name, each in BACKENDS.items() if each.compiles)  # names of the backends with engines


def find_backend(name: str) -> Backend:
    """Return the descriptor of the backend that a bundle names; raise BundleError if this version does not have it."""
    if name not in BACKENDS:
        raise BundleError(f"the bundle needs backend {name!r}, this specbuild has {', '.join(BACKENDS)}: update it")
    return BACKENDS[name]
