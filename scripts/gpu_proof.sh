#!/usr/bin/env bash
# Everything that needs a GPU, on a bare machine with the working tree, nvcc and a Python with torch, numpy and pytest,
# and no network: scripts/gpu_proof.sh [STAGE]...; all stages by default. docs/gpu.md says how to bring it there.
#   carry     joins what was brought in pieces (CARRIED, else build/carry) and installs its wheels under build/gpu/site
#   probe     which flavours import, build and run: probe.json
#   build     the kernels' library for this GPU
#   tests     every gpu test
#   sanitize  the kernels' tests under compute-sanitizer
#   bench     kernels, then engines; each is a stage of its own as well
#   kernels   benchmarks/kernels.py: kernels.json
#   engines   benchmarks/engines.py on every carried bundle, or those named like $BUNDLES: engines-*.json
# Results go to $OUT, else benchmarks/results/gpu. A stage that fails stops none. What is built stays in build/gpu
# (WORK), so the stages may run one call at a time.
set -uo pipefail
cd "$(dirname "$0")/.."
all="carry probe build tests sanitize bench"
known="$all kernels engines"
stages=${*:-$all}
for stage in $stages; do
  [[ " $known " == *" $stage "* ]] || { echo "unknown stage $stage: use $known" >&2 && exit 2; }
done
python=${PYTHON:-python3}
carried=${CARRIED:-build/carry}
work=${WORK:-$PWD/build/gpu}
out=${OUT:-benchmarks/results/gpu}
mkdir -p "$out" "$work/specbuild" "$work/joined"
# The package, uninstalled: its folders under the package's name. Carried packages go before the machine's.
for folder in builder runtime plugins; do ln -sfn "$PWD/$folder" "$work/specbuild/$folder"; done
export PYTHONPATH="$work:$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PATH="$PATH:/usr/local/cuda/bin" SPECBUILD_KERNELS="$work/libspecbuild_kernels.so"
# CUDA's libraries that came as packages: ONNX Runtime looks for them by name alone.
libraries=$("$python" -c '
import glob, sys
print(*(folder for path in sys.path for folder in glob.glob(f"{path}/nvidia/*/lib")), sep=":")')
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

carry() { # what is all there is installed, also where something is missing; `join` names that
  local status=0
  "$python" scripts/carry.py join "$carried" "$work/joined" || status=1
  ls "$work"/joined/*.whl >/dev/null 2>&1 || return $status
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
    --upgrade --target "$work/site" "$work"/joined/*.whl && return $status
}

probe() { "$python" scripts/flavours.py "$out/probe.json"; }

build() { # every source by itself, at once
  local jobs=() source status=0 compile=(nvcc -std=c++17 -O3 -arch=native -lineinfo -Xcompiler -fPIC -Iplugins -c)
  for source in plugins/kernels/*.cu; do
    "${compile[@]}" "$source" -o "$work/$(basename "$source").o" &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || status=1; done
  # Which way of copying is faster is for the benchmark to say.
  "${compile[@]}" -DSPECBUILD_NO_BULK plugins/kernels/attention.cu -o "$work/attention.no-bulk.o" || status=1
  [ $status = 0 ] && nvcc -shared "$work"/*.cu.o -o "$SPECBUILD_KERNELS" &&
    nvcc -shared "$work/attention.no-bulk.o" $(ls "$work"/*.cu.o | grep -v attention) -o "$work/no-bulk.so"
}

# A whole generation needs the exporter and its torch: it is the CPU's own test of the same kernels.
marked=(-m pytest -m gpu --continue-on-collection-errors --ignore tests/plugins/test_generation.py tests/plugins)

tests() { "$python" "${marked[@]}" tests/runtime 2>&1 | tee "$out/tests.txt"; }

sanitize() { # each kernel's tests, without hypothesis' hundreds of cases
  local tool status=0
  for tool in memcheck racecheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
      "$python" "${marked[@]}" -k 'not anything' 2>&1 | tee "$out/$tool.txt" || status=1
  done
  return $status
}

bench() {
  local status=0
  kernels || status=1
  engines || status=1
  return $status
}

kernels() {
  "$python" benchmarks/kernels.py --out "$out" --library "$SPECBUILD_KERNELS" 2>&1 | tee "$out/kernels.txt" &&
    "$python" benchmarks/kernels.py --out "$out/no-bulk" --library "$work/no-bulk.so" --quick --attention
}

engines() { # at most four minutes a bundle; the CPU's, whose tokens are expected, has a name that begins with cpu
  local bundle expected status=0 tried=0
  expected=$(ls -d "$work"/joined/cpu*.bundle 2>/dev/null | head -1)
  for bundle in "$work"/joined/${BUNDLES:-*}.bundle; do
    [ -d "$bundle" ] && [ "$bundle" != "$expected" ] || continue
    tried=1
    timeout 240 "$python" benchmarks/engines.py "$bundle" ${expected:+--cpu-bundle "$expected"} --out "$out" || status=1
  done
  [ $tried = 1 ] || { echo "no bundle was carried here"; status=1; }
  return $status
}

failed=0
for stage in $stages; do
  echo "== $stage"
  "$stage" || { echo "$stage failed"; failed=1; }
done
exit $failed
