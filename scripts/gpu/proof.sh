#!/usr/bin/env bash
# Everything that needs a GPU, in five stages that each stand alone, take less than 8 minutes and write JSON as they go:
# scripts/gpu/proof.sh [a|b|c|d|e]...; all by default. For a bare machine with the working tree, nvcc and a Python with
# torch, numpy and pytest, and no network. docs/guides/gpu.md says what each proves, and how to bring it there.
#   a  the repository alone: which flavours run (probe.json), the kernels compiled for this GPU, every test for a GPU in
#      a process per file (tests.json), and under compute-sanitizer (memcheck.json, racecheck.json)
#   b  the kernels' times against the copy bandwidth and torch's attention: kernels.json, no-bulk/kernels.json
#   c  bundles of ONNX Runtime's CUDA provider, carried in pieces or found in BUNDLES_AT: engines-*.json
#   d  on a card that TensorRT-RTX lists: a bundle is built where none was carried, loaded twice and run: rtx.json,
#      engines-rtx-*.json
#   e  shapes without weights (make_shape.py), carried or found in BUNDLES_AT: their weights are made here, then their
#      steps and recorded rounds measured: shape-*.json. BATCHES and CONTEXTS choose some, such as BATCHES=1,4
# Results go to $OUT, else benchmarks/results/gpu; what is built stays in $WORK, else build/gpu. BUNDLE names one of
# several (a pattern); SMOKE=1 takes the smallest cases, PYTHON another Python; MOST are a stage's seconds; PREBUILT=1
# takes the two libraries that $WORK has, in place of compiling them.
set -uo pipefail
cd "$(dirname "$0")/../.."
stages=${*:-a b c d e}
for stage in $stages; do
  [[ " a b c d e " == *" $stage "* ]] || { echo "unknown stage $stage: use a, b, c, d, e" >&2 && exit 2; }
done
python=${PYTHON:-python3}
carried=${CARRIED:-build/carry}
work=${WORK:-$PWD/build/gpu}
bundles=${BUNDLES_AT:-$work/joined}
out=${OUT:-benchmarks/results/gpu}
smoke=${SMOKE:+--smoke}
most=${MOST:-460} # seconds of a stage
installed=${PYTHONPATH:-}
mkdir -p "$out" "$work/specbuild" "$work/joined"
# The package, uninstalled: its folders under the package's name. Carried packages go before the machine's.
for folder in builder cli measure runtime plugins; do ln -sfn "$PWD/$folder" "$work/specbuild/$folder"; done
export PYTHONPATH="${installed:+$installed:}$work:$work/site" PYTHONUNBUFFERED=1
export PATH="$PATH:/usr/local/cuda/bin" SPECBUILD_KERNELS="$work/libspecbuild_kernels.so"
# CUDA's libraries that came as packages: ONNX Runtime looks for them by name alone.
libraries=$("$python" -c '
import glob, sys
print(*(folder for path in sys.path for folder in glob.glob(f"{path}/nvidia/*/lib")), sep=":")')
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$libraries"

left() { # the seconds that are left of this stage, at most $1; 1 where none are
  local rest=$((most - SECONDS))
  ((rest > $1)) && rest=$1
  echo $((rest > 1 ? rest : 1))
}

build() { # every source by itself, at once; without the copy engine too: which way is faster is for b to say
  [ -z "${PREBUILT:-}" ] || { ls "$SPECBUILD_KERNELS" >/dev/null; return; }
  local jobs=() source status=0 compile=(timeout "$(left 200)" nvcc -std=c++17 -O3 -arch=native -lineinfo -Xcompiler -fPIC -Iplugins -c)
  rm -f "$work"/*.o
  for source in plugins/kernels/*.cu; do
    "${compile[@]}" "$source" -o "$work/$(basename "$source").o" &
    jobs+=($!)
  done
  "${compile[@]}" -DSPECBUILD_NO_BULK plugins/kernels/attention.cu -o "$work/attention.no-bulk.o" &
  jobs+=($!)
  for job in "${jobs[@]}"; do wait "$job" || status=1; done
  [ $status = 0 ] && nvcc -shared "$work"/*.cu.o -o "$SPECBUILD_KERNELS" &&
    nvcc -shared "$work/attention.no-bulk.o" $(ls "$work"/*.cu.o | grep -v attention) -o "$work/no-bulk.so"
}

tests() { # $1 a tool or none, $2 seconds at most; under a tool without hypothesis' hundreds of cases
  local name=$1 tool=()
  [ "$1" = tests ] || tool=(--tool "$1" -k 'not anything and not loop')
  [ -z "$smoke" ] || tool+=(--only 'test_(walk|publish|capture)')
  "$python" scripts/gpu/run_tests.py "$out/$name.json" --seconds "$(left "$2")" "${tool[@]}"
}

a() {
  local status=0 tool jobs=() job
  carry
  build || { echo "nvcc compiles no kernels"; return 1; }
  timeout "$(left 120)" "$python" scripts/gpu/flavours.py "$out/probe.json" >/dev/null &
  jobs+=($!)
  for tool in tests memcheck racecheck; do # at once: none of them measures a time
    [ $tool = tests ] || command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer"; status=1; break; }
    tests $tool 300 &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || status=1; done
  return $status
}

b() {
  carry
  [ -f "$work/no-bulk.so" ] || build || return 1
  local measure=("$python" -m benchmarks.gpu.kernels ${smoke:+"$smoke"}) status=0
  timeout "$(left 320)" "${measure[@]}" --out "$out" --library "$SPECBUILD_KERNELS" --seconds $((most * 9 / 20)) || status=1
  timeout "$(left 90)" "${measure[@]}" --out "$out/no-bulk" --library "$work/no-bulk.so" --seconds $((most / 8)) --quick \
    --attention || status=1
  return $status
}

carry() { # joins what was brought and installs its wheels: all there is, also where something is missing
  local status=0
  [ -d "$carried" ] || return 0
  "$python" scripts/gpu/carry.py join "$carried" "$work/joined" || status=1
  [ -d "$work/joined/site" ] && cp -a "$work/joined/site/." "$work/site/"
  ls "$work"/joined/*.whl >/dev/null 2>&1 || return $status
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
    --upgrade --target "$work/site" "$work"/joined/*.whl && return $status
}

engines() { # $1 a pattern; the CPU's bundle, whose tokens are expected, has a name that begins with cpu
  local bundle expected status=0 tried=0
  expected=$(ls -d "$bundles"/cpu*.bundle 2>/dev/null | head -1)
  for bundle in "$bundles"/${BUNDLE:-$1}.bundle; do
    [ -d "$bundle" ] || continue
    tried=1
    ((SECONDS < most - 60)) || { echo "no time is left for $bundle: name it in BUNDLE"; status=1; continue; }
    measure=("$python" -m benchmarks.gpu.engines "$bundle" ${expected:+--cpu-bundle "$expected"} --out "$out")
    timeout "$(left 300)" "${measure[@]}" ${smoke:+"$smoke"} >/dev/null || status=1
    [ "$1" != 'ort-*' ] || timeout "$(left 150)" "${measure[@]}" --smoke --cudnn-attention >/dev/null || status=1
  done
  [ $tried = 1 ] || { echo "there is no bundle ${BUNDLE:-$1} in $bundles"; status=1; }
  return $status
}

c() {
  local status=0
  carry || status=1
  engines 'ort-*' || status=1
  return $status
}

compile() { # $1 a name, the rest options: by the specbuild that is installed here, where no such bundle was carried
  [ -d "$bundles/$1.bundle" ] && return
  command -v specbuild >/dev/null || { echo "$1 was not carried, and no specbuild is installed here"; return 1; }
  PYTHONPATH=$installed specbuild build --target engines/pycode/target --draft engines/pycode/draft --no-tune \
    -o "$bundles/$1.bundle" "${@:2}" ${smoke:+--max-seq-len 256 --max-batch-size 2 --buckets 1,2,4,8}
}

d() {
  local status=0 said gpu
  carry || status=1
  said=$("$python" scripts/gpu/rtx_lists.py "$out/rtx.json") || { local no=$?; echo "$said"; return $((status | no != 3)); }
  gpu=$("$python" -c 'import json, sys; print(json.loads(sys.argv[1])["gpu"])' "$said")
  mkdir -p "$bundles"
  ls -d "$bundles"/cpu*.bundle >/dev/null 2>&1 || compile cpu-fp32 || status=1
  ls -d "$bundles"/rtx-*.bundle >/dev/null 2>&1 ||
    compile rtx-fp16 --backend tensorrt-rtx --precision fp16 --arch "$gpu" --cuda-arch "$gpu" || return 1
  engines 'rtx-*' || status=1
  return $status
}

e() {
  local status=0 tried=0 shape most=$((most < 230 ? most : 230)) # a call of four minutes
  carry || status=1
  for shape in "$bundles"/${BUNDLE:-shape-*}.bundle; do
    [ -d "$shape" ] || continue
    tried=1
    ls "$shape"/*/weights.bin >/dev/null 2>&1 || timeout "$(left 150)" "$python" scripts/gpu/make_weights.py "$shape" ||
      { status=1; continue; }
    timeout "$(left 230)" "$python" -m benchmarks.gpu.shape "$shape" --out "$out" --seconds "$(($(left 230) - 50))" \
      ${smoke:+"$smoke"} ${BATCHES:+--batches "$BATCHES"} ${CONTEXTS:+--contexts "$CONTEXTS"} >/dev/null || status=1
  done
  [ $tried = 1 ] || { echo "there is no bundle ${BUNDLE:-shape-*} in $bundles"; status=1; }
  return $status
}

failed=0
for stage in $stages; do
  SECONDS=0
  echo "== $stage"
  "$stage" || { echo "stage $stage failed"; failed=1; }
  echo "== $stage took $SECONDS s"
done
exit $failed
