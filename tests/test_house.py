"""The layout: imports run one way, nothing goes in circles, and every module has its test file."""

from __future__ import annotations

import ast
import graphlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("face", "cli", "builder", "measure", "runtime")
PLANTED = {  # file: a line, and the contract that it breaks
    "runtime/bundle/bundle.py": ("from specbuild.runtime.engine.engine import Engine", "runtime: engine → decoding"),
    "measure/roofline.py": (
        "from specbuild.builder.targets import BOUND",
        "cli → {serve, builder} → measure → runtime",
    ),
    "builder/passes/qkv.py": ("from specbuild.builder.lower import standard", "builder: orchestration → check"),
    "runtime/sampling/logprobs.py": ("import torch", "the runtime stays lean"),
    "runtime/speculation/tree.py": ("from specbuild.runtime.speculation.policy import Policy", "no circles"),
}


def modules() -> list[Path]:
    return sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/package_tree.py", "build/package", "--lint-imports"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_planted_imports_fail_the_lint(tmp_path: Path) -> None:
    """Each of them inside a function, where it would do no harm before it is called."""
    for path in modules():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/package_tree.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    sound = lint_imports(tmp_path)
    assert sound.returncode == 0, sound.stdout + sound.stderr
    for name, (line, _) in PLANTED.items():
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write(f"\n\ndef planted() -> None:\n    {line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    for _, contract in PLANTED.values():
        assert re.search(rf"{re.escape(contract)}[^.]*? BROKEN", text), contract


@pytest.mark.parametrize("folder", ["benchmarks", "benchmarks/peers", "scripts", "tests/support", "examples"])
def test_scripts_beside_each_other_do_not_import_in_circles(folder: str) -> None:
    files = {path.stem: path for path in (ROOT / folder).glob("*.py")}
    imports: dict[str, set[str]] = {}
    for name, path in files.items():
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        asked = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        asked |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        imports[name] = asked & files.keys()
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def test_every_module_has_its_test_file() -> None:
    lacking = [
        path.as_posix()
        for path in modules()
        if path.name != "__init__.py" and not (ROOT / "tests" / path.parent / f"test_{path.name}").exists()
    ]
    assert not lacking, f"no test file for {', '.join(lacking)}"
