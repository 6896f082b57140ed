"""What `make dist` writes is what a server was installed from, and an offline machine can be."""

import json
import subprocess
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.soak


def test_a_release_installs_offline(tmp_path, bundle):
    """Needs an index of packages, and minutes."""
    source, wheels, place = (tmp_path / name for name in ("source", "wheels", "offline"))
    dist, pip = source / "dist", place / "bin" / "pip"
    venv.create(place, with_pip=True)

    def run(*command, **options):
        subprocess.run([*map(str, command)], check=True, **options)

    run("git", "clone", "--quiet", ROOT, source)
    run("sh", "scripts/release/dist.sh", cwd=source, stdout=subprocess.DEVNULL)
    run("sha256sum", "--check", "--quiet", "SHA256SUMS", cwd=dist)
    for wheel in (*dist.glob("*manylinux_2_17_x86_64.whl"), *dist.glob("*manylinux_2_17_aarch64.whl")):
        assert "specbuild/runtime/lib/libspecbuild_cpu.so" in zipfile.ZipFile(wheel).namelist()
    assert len([*dist.glob("*.whl")]) == 2
    pinned = {line.partition("==")[0].lower() for line in (dist / "requirements.txt").read_text().splitlines()}
    listed = {each["name"].lower() for each in json.loads((dist / "sbom.cdx.json").read_text())["components"]}
    assert {*pinned, "specbuild-trt"} <= listed
    run(pip, "download", "-qr", dist / "requirements.txt", "-d", wheels)
    run(pip, "install", "-q", "--no-index", "--find-links", wheels, "--find-links", dist, "specbuild-trt[serve]")
    run(place / "bin" / "specbuild", "serve", bundle, "--check")
