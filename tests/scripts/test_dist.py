"""What `make dist` writes is what a server was installed from, and an offline machine can be."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.soak


def test_a_release_installs_offline(tmp_path: Path, bundle: Path) -> None:
    """Needs an index of packages, and minutes."""
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", ROOT, source], check=True)
    subprocess.run(["sh", "scripts/release/dist.sh"], cwd=source, check=True, stdout=subprocess.DEVNULL)
    dist = source / "dist"
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=dist, check=True)
    pinned = {line.partition("==")[0].lower() for line in (dist / "requirements.txt").read_text().splitlines()}
    listed = {each["name"].lower() for each in json.loads((dist / "sbom.cdx.json").read_text())["components"]}
    assert pinned <= listed
    assert "specbuild-trt" in listed
    wheels, place = tmp_path / "wheels", tmp_path / "offline"
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-qr", dist / "requirements.txt", "-d", wheels], check=True
    )
    venv.create(place, with_pip=True)
    install = [place / "bin" / "pip", "install", "-q", "--no-index", "--find-links", wheels, "--find-links", dist]
    subprocess.run([*install, "specbuild-trt[serve]"], check=True)
    subprocess.run([place / "bin" / "specbuild", "serve", bundle, "--check"], check=True)
