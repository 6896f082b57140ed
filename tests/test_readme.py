"""Every command of the README and the docs runs, and every link in them leads somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)")


def blocks(language: str) -> list[str]:
    return [code for page in PAGES for kind, code in BLOCK.findall((ROOT / page).read_text()) if kind == language]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Path:
    """A folder that looks like a clone after `make demo`."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("engines", "examples", "scripts", "tests"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(bundle, folder / "pycode.bundle")  # which is tuned here, in place
    return folder


def shell_blocks() -> list[Any]:
    """Those that build, train, tune or measure are slow."""
    slow = re.compile(r"^(specbuild (build|distill|pair|tune|bench|profile|verify)|time )", re.MULTILINE)
    return [pytest.param(each, marks=[pytest.mark.slow] if slow.search(each) else []) for each in blocks("bash")]


@pytest.mark.parametrize("script", shell_blocks())
def test_shell_block_runs(script: str, workplace: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=workplace,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", blocks("python"))
def test_python_block_runs(script: str, workplace: Path) -> None:
    done = subprocess.run([sys.executable, "-c", script], cwd=workplace, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in LINK.findall((ROOT / page).read_text()):
        assert target.startswith("https://") or (ROOT / page).parent.joinpath(target).exists(), target


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
