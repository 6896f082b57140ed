#!/usr/bin/env bash
# Everything that needs a GPU, on a bare machine with the working tree, nvcc and a Python with torch, numpy and pytest.
# Results go to $OUT (or benchmarks/out). scripts/gpu_proof.sh [probe] [build] [tests] [sanitize] [bench]; all by default.
# What is built lies in build/gpu, so the stages may also be run one call at a time.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/out}
python=${PYTHON:-python3}
stages=${*:-probe build tests sanitize bench}
mkdir -p "$out" build/gpu/specbuild
export PATH="$PATH:/usr/local/cuda/bin" PYTHONUNBUFFERED=1
# The package, uninstalled: its folders under the package's name.
for folder in builder runtime plugins; do ln -sfn "$PWD/$folder" "build/gpu/specbuild/$folder"; done
export PYTHONPATH="$PWD/build/gpu${PYTHONPATH:+:$PYTHONPATH}"
export SPECBUILD_KERNELS="$PWD/build/gpu/libspecbuild_kernels.so"
failed=0

probe() { # which flavours import, and what the machine has
  "$python" - "$out/probe.json" <<'PY'
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
}

build() { # the kernels for this machine's GPU, every source by itself, at once
  local jobs=() source status=0
  for source in plugins/kernels/*.cu; do
    nvcc -std=c++17 -O3 -arch=native -lineinfo -Xcompiler -fPIC -Iplugins -c "$source" -o "build/gpu/$(basename "$source").o" &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || status=1; done
  nvcc -std=c++17 -O3 -arch=native -lineinfo -Xcompiler -fPIC -Iplugins -DSPECBUILD_NO_BULK -c plugins/kernels/attention.cu \
    -o build/gpu/attention.no-bulk.o || status=1 # which way of copying is faster is for the benchmark to say
  [ $status = 0 ] && nvcc -shared build/gpu/*.cu.o -o "$SPECBUILD_KERNELS" &&
    nvcc -shared build/gpu/attention.no-bulk.o $(ls build/gpu/*.cu.o | grep -v attention) -o build/gpu/no-bulk.so
}

# A whole generation needs the exporter and its torch: it is the CPU's own test of the same kernels.
tests() { "$python" -m pytest -m gpu tests/plugins --ignore tests/plugins/test_generation.py 2>&1 | tee "$out/tests.txt"; }

sanitize() { # each kernel's tests, without hypothesis' hundreds of cases
  local tool status=0
  for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
      "$python" -m pytest -m gpu tests/plugins --ignore tests/plugins/test_generation.py -k 'not anything' 2>&1 |
      tee "$out/$tool.txt" || status=1
  done
  return $status
}

bench() {
  "$python" benchmarks/kernels.py --out "$out" --library "$SPECBUILD_KERNELS" 2>&1 | tee "$out/kernels.txt" &&
    "$python" benchmarks/kernels.py --out "$out/no-bulk" --library build/gpu/no-bulk.so --quick --attention
}

for stage in $stages; do
  echo "== $stage"
  "$stage" || { echo "$stage failed"; failed=1; }
done
exit $failed
