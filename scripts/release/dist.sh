#!/bin/sh
# What a release has, in dist/: sdist, wheels, what the server needs at which versions, and an SBOM of it (CycloneDX).
# dist.sh [EXTRAS], serve by default. Run from the repository's root; dist/ is replaced once all is there.
# Wheels have the operators for CPUs, which zig compiles for every Linux since glibc 2.17 (manylinux2014).
set -eu
extras=${1:-serve}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check build cyclonedx-bom wheel ziglang
zig=$("$work/tools/bin/python" -c "import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name('zig'))")
"$work/tools/bin/python" -m build --sdist --outdir "$work/dist" .
for arch in x86_64 aarch64; do
  printf '#!/bin/sh\nexec "%s" c++ -target %s-linux-gnu.2.17 "$@"\n' "$zig" $arch >"$work/$arch-c++"
  chmod +x "$work/$arch-c++"
  CXX="$work/$arch-c++" LDFLAGS=-Wl,-s _PYTHON_HOST_PLATFORM=linux-$arch SKBUILD_INSTALL_STRIP=false \
    SKBUILD_CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux;-DCMAKE_SYSTEM_PROCESSOR=$arch" \
    "$work/tools/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work/wheels" "$work"/dist/*.tar.gz
  "$work/tools/bin/wheel" tags --remove --platform-tag "manylinux_2_17_$arch.manylinux2014_$arch" "$work"/wheels/*-linux_$arch.whl
done
mv "$work"/wheels/*.whl "$work/dist"
"${PYTHON:-python3}" -m venv "$work/served"
"$work/served/bin/pip" install --quiet --disable-pip-version-check --find-links "$work/dist" "specbuild-trt[$extras]"
"$work/served/bin/pip" freeze --exclude specbuild-trt >"$work/dist/requirements.txt"
"$work/tools/bin/cyclonedx-py" environment --output-reproducible --output-format JSON \
  --output-file "$work/dist/sbom.cdx.json" "$work/served/bin/python"
(cd "$work/dist" && sha256sum -- * >SHA256SUMS)
rm -rf dist
mv "$work/dist" dist
ls dist
