#!/usr/bin/env bash
# Everything that needs a GPU, in one go on a bare machine with the working tree: results go to $OUT (or benchmarks/out).
# This version has no GPU code; what there is to learn is which TensorRT flavours import and what the machine has.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/out}
mkdir -p "$out"
python3 - "$out/probe.json" <<'PY'
import importlib, json, platform, subprocess, sys

def ask(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except OSError as error:
        return str(error)

found = {"python": platform.python_version(), "nvcc": ask("nvcc", "--version"),
         "gpu": ask("nvidia-smi", "--query-gpu=name,compute_cap,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader")}
for name in ("tensorrt", "tensorrt_rtx", "tensorrt_lean", "onnxruntime", "torch", "cuda.core", "cuda.bindings", "triton"):
    try:
        found[name] = getattr(importlib.import_module(name), "__version__", "imports")
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
if isinstance(found["onnxruntime"], str) and "Error" not in found["onnxruntime"]:
    import onnxruntime
    found["onnxruntime_providers"] = onnxruntime.get_available_providers()
json.dump(found, open(sys.argv[1], "w"), indent=2)
print(json.dumps(found, indent=2))
PY
if python3 -c 'import specbuild, pytest' 2>/dev/null; then
  python3 -m pytest -m gpu || [ $? -eq 5 ]  # 5: no test is marked gpu
fi
