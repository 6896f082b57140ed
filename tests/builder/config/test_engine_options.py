"""What may be asked of engines, and what each backend has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbuild.builder.config.engine_options import EngineOptions, architectures
from specbuild.runtime.bundle.backend import BACKENDS
from specbuild.runtime.errors import OptionError


@pytest.mark.parametrize(
    ("wanted", "found"), [([], ()), (["portable"], ()), (["89,sm_120", "89"], ("89", "120")), (["sm_75"], ("75",))]
)
def test_architectures(wanted: list[str], found: tuple[str, ...]) -> None:
    assert architectures(wanted) == found


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["90"], "has no sm_90: use 75"),
        (["portable", "89"], "not both"),
        ([""], "an architecture is empty: use"),
        (["x,89"], "sm_x"),
    ],
)
def test_architectures_refused(wanted: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        architectures(wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"builder_optimization_level": 6}, "builder-optimization-level must be 0…5, not 6"),
        ({"workspace": 0}, "workspace must be 1…4194304 MiB, not 0"),
        ({"prompt_chunk": 63}, "prompt-chunk must be 64…4096 nodes, not 63"),
        ({"attention": "flash"}, "unknown --attention 'flash': use plugin, native"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "unknown --kv-cache-dtype 'fp8_e5m2': use auto, fp8"),
        ({"kv_cache_dtype": None}, "unknown --kv-cache-dtype None: use auto, fp8"),
        *(
            ({"block_size": rows}, f"block-size must be 16, 32, 64, 128, 256 rows, or 0 for linear caches, not {rows}")
            for rows in (-16, 8, 48, 512)
        ),
        ({"hardware_compatible": "all"}, "unknown --hardware-compatible 'all': use ampere-plus"),
        ({"arch": ("90",)}, "no sm_90"),
    ],
)
def test_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        EngineOptions(**options)


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("onnxruntime", {"arch": ("89",)}, "backend onnxruntime compiles no engine: drop --arch"),
        ("onnxruntime", {"prompt_chunk": 256}, "drop --prompt-chunk"),
        ("onnxruntime-cuda", {"weight_streaming": True}, "drop --weight-streaming"),
        ("onnxruntime", {"attention": "native"}, "drop --attention"),
        ("tensorrt", {"arch": ("89",)}, "compiles for the GPU it runs on: drop --arch"),
        ("tensorrt-rtx", {"attention": "plugin"}, "takes no plugins"),
        *(
            (backend, {"kv_cache_dtype": "fp8"}, "the plugin's alone: use --backend tensorrt, or drop --kv-cache-dtype")
            for backend in ("onnxruntime", "onnxruntime-cuda", "tensorrt-rtx")
        ),
        (
            "tensorrt",
            {"kv_cache_dtype": "fp8", "attention": "native"},
            "use --backend tensorrt without --attention nat",
        ),
        *(
            (backend, {"block_size": 16}, "paged caches are the plugin's alone: .* tensorrt, or drop --block-size 16")
            for backend in ("onnxruntime", "onnxruntime-cuda", "tensorrt-rtx")
        ),
        ("tensorrt", {"block_size": 64, "attention": "native"}, "tensorrt without --attention native, or drop --block"),
        ("tensorrt-rtx", {"timing_cache": Path("cache")}, "has no --timing-cache"),
        ("tensorrt-rtx", {"version_compatible": True}, "has no --version-compatible"),
        ("tensorrt-rtx", {"hardware_compatible": "ampere-plus"}, "has no --hardware-compatible"),
    ],
)
def test_nothing_is_ignored(backend: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        EngineOptions(**options).check(BACKENDS[backend])


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("onnxruntime", {}),
        ("onnxruntime", {"kv_cache_dtype": "auto"}),
        ("tensorrt", {"kv_cache_dtype": "fp8"}),
        ("tensorrt", {"kv_cache_dtype": "fp8", "attention": "plugin"}),
        ("onnxruntime", {"block_size": 0}),
        ("onnxruntime-cuda", {"attention": "native"}),
        ("onnxruntime-cuda", {"attention": "plugin"}),
        ("tensorrt", {"kv_cache_dtype": "fp8", "block_size": 256}),
        ("tensorrt", {"attention": "native", "timing_cache": Path("cache"), "version_compatible": True}),
        ("tensorrt-rtx", {"arch": ("portable",), "attention": "native", "weight_streaming": True}),
    ],
)
def test_what_a_backend_has(backend: str, options: dict[str, Any]) -> None:
    EngineOptions(**options).check(BACKENDS[backend])
