"""Probe which runtime flavours work here: each imports, builds a toy and runs it, in a process that may crash alone.

python scripts/gpu/flavours.py [OUT.json]

Results are observed, never inferred: each step reports its outcome; "fails" names the first step without one, "reason"
and "stderr" quote its error. The toy adds four numbers to themselves. TensorRT's lean runtime cannot build: it runs a
toy built by full TensorRT, if that is installed.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Steps = Iterator[tuple[str, Any]]
STEPS = ("imports", "builds", "runs")
SECONDS = 60  # time limit of a flavour
NUMBERS = (1.0, 2.0, 3.0, 4.0)
SOURCE = (
    'extern "C" __global__ void twice(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x] + x[threadIdx.x]; }'
)
PACKAGES = (
    *("numpy", "torch", "triton", "transformers", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu", "tokenizers"),
    *("cuda-core", "nvidia-cuda-nvrtc", "nvidia-cublas", "nvidia-cudnn-cu13", "hypothesis", "pytest"),
)
GPU = "name,compute_cap,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm"


class Driver:
    """Two vectors on the first GPU, using the CUDA driver only."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
        self._call("cuDeviceGetAttribute", ctypes.byref(minor), 76, device)
        self.capability = f"{major.value}{minor.value}"
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._call("cuCtxSetCurrent", self._context)
        self._host = (ctypes.c_float * len(NUMBERS))(*NUMBERS)
        self.x, self.y = self._vector(), self._vector()

    def _vector(self) -> int:
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(ctypes.sizeof(self._host)))
        self._call("cuMemcpyHtoD_v2", pointer, self._host, ctypes.c_size_t(ctypes.sizeof(self._host)))
        return pointer.value

    def check(self) -> bool:
        """Return True if y is 2 x; raise RuntimeError if not."""
        found = (ctypes.c_float * len(NUMBERS))()
        self._call("cuCtxSynchronize")
        self._call("cuMemcpyDtoH_v2", found, ctypes.c_uint64(self.y), ctypes.c_size_t(ctypes.sizeof(found)))
        return right(list(found))

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {status}")


def right(found: list[float]) -> bool:
    """Return True if the toy's result is right; raise RuntimeError if not."""
    if found != [x + x for x in NUMBERS]:
        raise RuntimeError(f"the toy gave {found}")
    return True


def architecture() -> str:
    """Return the GPU's compute capability; without a GPU "90", that of the test machine."""
    try:
        return Driver().capability
    except (OSError, RuntimeError):
        return "90"


def tensorrt(name: str, runner: str | None = None) -> Steps:
    """Probe TensorRT or TensorRT-RTX; `runner`: the module that runs the plan, `name` by default."""
    trt = importlib.import_module(name)
    running = importlib.import_module(runner) if runner else trt
    yield "imports", str(running.__version__)
    log, words = logger(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    x = network.add_input("x", trt.float32, (len(NUMBERS),))
    y = network.add_elementwise(x, x, trt.ElementWiseOperation.SUM).get_output(0)
    y.name = "y"
    network.mark_output(y)
    config = builder.create_builder_config()
    if runner:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("; ".join(words))
    if hasattr(trt, "ComputeCapability"):
        yield "lists", [each for each in trt.ComputeCapability.__members__ if each.startswith("SM")]
    yield "builds", f"{plan.nbytes} bytes"
    gpu = Driver()
    log, words = logger(running)
    engine = running.Runtime(log).deserialize_cuda_engine(plan)
    context = engine and engine.create_execution_context()
    if not context:
        raise RuntimeError("; ".join(words))
    context.set_tensor_address("x", gpu.x)
    context.set_tensor_address("y", gpu.y)
    if not context.execute_async_v3(0):
        raise RuntimeError("; ".join(words))
    yield "runs", gpu.check()


def logger(trt: Any) -> tuple[Any, list[str]]:
    """Return a logger, and the list to which it appends warnings and errors."""
    words: list[str] = []

    class Log(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.WARNING:
                words.append(" ".join(message.split()))

    return Log(), words


def lean() -> Steps:
    """Probe the lean runtime with a version-compatible plan built by full TensorRT."""
    version = importlib.import_module("tensorrt_lean").__version__
    try:
        importlib.import_module("tensorrt")
    except ImportError as error:
        yield "imports", str(version)
        raise RuntimeError(f"it has no builder, and there is no tensorrt whose plan it could run ({error})") from None
    yield from tensorrt("tensorrt", "tensorrt_lean")


def onnxruntime() -> Steps:
    """Probe ONNX Runtime's CUDA provider, without fallback to the CPU provider."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when it is imported
    ort: Any = importlib.import_module("onnxruntime")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise ImportError(f"onnxruntime {ort.__version__} has no CUDAExecutionProvider")
    yield "imports", str(ort.__version__)
    import numpy as np
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [len(NUMBERS)]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "toy", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CUDAExecutionProvider"])
    yield "builds", session.get_providers()
    (found,) = session.run(None, {"x": np.array(NUMBERS, np.float32)})
    yield "runs", right(found.tolist())


def cuda_core() -> Steps:
    """Probe cuda.core: compile a kernel by its Program and launch it on its stream."""
    core: Any = importlib.import_module("cuda.core")
    yield "imports", str(core.__version__)
    options = core.ProgramOptions(arch=f"sm_{architecture()}")
    code = core.Program(SOURCE, "c++", options).compile("cubin")
    yield "builds", f"{len(code.code)} bytes for sm_{architecture()}"
    gpu, device = Driver(), core.Device(0)
    device.set_current()
    stream = device.create_stream()
    kernel, launch = code.get_kernel("twice"), core.LaunchConfig(grid=1, block=len(NUMBERS))
    core.launch(stream, launch, kernel, gpu.x, gpu.y)
    stream.sync()
    yield "runs", gpu.check()


def cuda_bindings() -> Steps:
    """Probe cuda.bindings: compile a kernel by NVRTC and launch it by the driver."""
    driver, nvrtc = (importlib.import_module(f"cuda.bindings.{name}") for name in ("driver", "nvrtc"))
    yield "imports", importlib.metadata.version("cuda-bindings")

    def ask(answer: Any) -> Any:
        if answer[0]:
            raise RuntimeError(answer[0].name)
        return answer[1] if len(answer) > 1 else None

    program = ask(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"toy.cu", 0, [], []))
    ask(nvrtc.nvrtcCompileProgram(program, 1, [f"-arch=sm_{architecture()}".encode()]))
    code = b" " * ask(nvrtc.nvrtcGetCUBINSize(program))
    ask(nvrtc.nvrtcGetCUBIN(program, code))
    yield "builds", f"{len(code)} bytes for sm_{architecture()}"
    gpu = Driver()
    kernel = ask(driver.cuModuleGetFunction(ask(driver.cuModuleLoadData(code)), b"twice"))
    arguments = (gpu.x, gpu.y), (ctypes.c_void_p, ctypes.c_void_p)
    ask(driver.cuLaunchKernel(kernel, 1, 1, 1, len(NUMBERS), 1, 1, 0, 0, arguments, 0))
    yield "runs", gpu.check()


FLAVOURS: dict[str, Callable[[], Steps]] = {
    "tensorrt": lambda: tensorrt("tensorrt"),
    "tensorrt_rtx": lambda: tensorrt("tensorrt_rtx"),
    "tensorrt_lean": lean,
    "onnxruntime_cuda": onnxruntime,
    "cuda.core": cuda_core,
    "cuda.bindings": cuda_bindings,
}


def show(name: str) -> None:
    """Run a flavour in this process; print a line of JSON for each step, and one for an error."""
    try:
        for step, seen in FLAVOURS[name]():
            print(json.dumps({step: seen}), flush=True)
    except Exception as error:
        print(json.dumps({"reason": f"{type(error).__name__}: {' '.join(str(error).split())}"}), flush=True)


def probe(command: list[str], seconds: float = SECONDS) -> dict[str, Any]:
    """Run a flavour's process; return its steps and, if one is missing, why."""
    seen: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds)
        text, noise, ended = done.stdout, done.stderr, f"its process ended with status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        text, noise, ended = error.stdout or b"", error.stderr or b"", f"it took more than {seconds:g} s"
    for line in text.decode(errors="replace").splitlines():
        if line.startswith("{"):
            seen |= json.loads(line)
    if missing := [step for step in STEPS if step not in seen]:
        words = " ".join(noise.decode(errors="replace").split())[-800:]
        seen |= {"fails": missing[0], "reason": seen.get("reason", ended), **({"stderr": words} if words else {})}
    return seen


def ask(*command: str) -> str:
    """Return a tool's output; "" if the tool is not installed."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


def version(name: str) -> str | None:
    """Return a package's version; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Probe everything, print the result, and write it to a file if one is given."""
    if sys.argv[1:2] == ["--one"]:
        show(sys.argv[2])
        return
    found = {
        "python": f"{platform.python_version()} at {sys.executable}",
        "gpu": ask("nvidia-smi", f"--query-gpu={GPU}", "--format=csv,noheader"),
        "nvcc": ask("nvcc", "--version").rpartition("\n")[2],
        "packages": {name: version(name) for name in PACKAGES},
        "flavours": {name: probe([sys.executable, __file__, "--one", name]) for name in FLAVOURS},
    }
    text = json.dumps(found, indent=2)
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
