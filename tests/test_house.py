"""The layout: imports run one way, conditional expressions are not nested, no backend is told by name."""

import ast
import graphlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specbuild.runtime.bundle.backend import BACKENDS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("face", "cli", "serve", "builder", "measure", "runtime")
LOOKED_AT = (*FOLDERS, "benchmarks", "scripts", "examples")
PLANTED = {  # file: a line, and the contract that it breaks
    "runtime/bundle/bundle.py": ("from specbuild.runtime.engine.engine import Engine", "runtime: engine → decoding"),
    "measure/roofline.py": (
        "from specbuild.builder.targets import HEAD_DIMS",
        "cli → {serve, builder} → measure → runtime",
    ),
    "builder/passes/qkv.py": ("from specbuild.builder.lower import standard", "builder: orchestration → check"),
    "runtime/sampling/logprobs.py": ("import torch", "the runtime stays lean"),
    "runtime/speculation/tree.py": ("from specbuild.runtime.speculation.controller import Controller", "no circles"),
}


def modules():
    return sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def lint_imports(root):
    command = [sys.executable, "scripts/release/package_tree.py", "build/package", "--lint-imports"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.mark.nightly
def test_planted_imports_fail_the_lint(tmp_path):
    """Each of them inside a function, where it would do no harm before it is called."""
    for path in modules():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "scripts" / "release").mkdir(parents=True)
    for name in ("scripts/release/package_tree.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, (line, _) in PLANTED.items():
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write(f"\n\ndef planted() -> None:\n    {line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    for _, contract in PLANTED.values():
        assert re.search(rf"{re.escape(contract)}[^.]*? BROKEN", text), contract


@pytest.mark.parametrize("folder", ["benchmarks", "scripts", "tests/support", "examples"])
def test_scripts_do_not_import_in_circles(folder):
    """By the whole name or, where a script is run by its path, by that of the file beside it."""
    files = sorted((ROOT / folder).rglob("*.py"))
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    imports = {}
    for path, name in names.items():
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        asked = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                asked |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        package = name.rpartition(".")[0]
        imports[name] = (asked | {f"{package}.{each}" for each in asked}) & set(names.values())
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def compared(node):
    """The texts that an expression is compared with, or a `match` looks for."""
    sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    sides += [node.value] if isinstance(node, ast.MatchValue) else []
    parts = [each for side in sides for each in (getattr(side, "elts", None) or [side])]
    return {each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def is_nested(node):
    """Whether a conditional expression has another inside."""
    return any(isinstance(inner, ast.IfExp) for part in ast.iter_child_nodes(node) for inner in ast.walk(part))


def test_no_code_breaks_what_ruff_has_no_rule_for():
    nested, named = list[str](), list[str]()
    for folder in LOOKED_AT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.IfExp) and is_nested(node):
                    nested.append(f"{path}:{node.lineno}")
                elif isinstance(node, ast.Compare | ast.MatchValue) and compared(node) & BACKENDS.keys():
                    named.append(f"{path}:{node.lineno}")
    assert not nested, f"write an if statement: {', '.join(nested)}"
    assert not named, f"a backend's name is compared in {', '.join(named)}"
