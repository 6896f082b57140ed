#!/bin/sh
# What a release has, in dist/: sdist, wheel, what the server needs at which versions, and an SBOM of it (CycloneDX).
# dist.sh [EXTRAS], serve by default. Run from the repository's root; dist/ is replaced once all is there.
set -eu
extras=${1:-serve}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check build cyclonedx-bom
"$work/tools/bin/python" -m build --outdir "$work/dist" .
"${PYTHON:-python3}" -m venv "$work/served"
"$work/served/bin/pip" install --quiet --disable-pip-version-check "$(ls "$work"/dist/*.whl)[$extras]"
"$work/served/bin/pip" freeze --exclude specbuild-trt >"$work/dist/requirements.txt"
"$work/tools/bin/cyclonedx-py" environment --output-reproducible --output-format JSON \
  --output-file "$work/dist/sbom.cdx.json" "$work/served/bin/python"
(cd "$work/dist" && sha256sum -- * >SHA256SUMS)
rm -rf dist
mv "$work/dist" dist
ls dist
