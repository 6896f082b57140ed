"""Lay out the sources as the installed package, for tools that read files: mypy and import-linter.

    python scripts/release/package_tree.py build/package [--lint-imports]

The folders are those of pyproject.toml's `wheel.packages`; every file is a link, so the contents are always current.
With `--lint-imports`, import-linter checks pyproject.toml's contracts on that tree, whatever is installed.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def packages() -> dict[str, str]:
    """Return the folder of each installed package, such as {"specbuild/cli": "cli"}."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(project["tool"]["scikit-build"]["wheel"]["packages"])


def lay_out(tree: Path) -> None:
    """Create the tree, replacing an older one; leave with an error if the folder has anything else."""
    if tree.is_dir() and not {child.name for child in tree.iterdir()} <= {"specbuild", ".mypy_cache"}:
        raise SystemExit(f"{tree} is no older tree: name a folder of its own, such as build/package")
    shutil.rmtree(tree, ignore_errors=True)
    for package, folder in packages().items():
        for source in (ROOT / folder).rglob("*.py"):
            link = tree / package / source.relative_to(ROOT / folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(source)


def lint_imports(tree: Path) -> int:
    """Return import-linter's exit status on the tree; an editable installation's finder, which hides it, is removed."""
    from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

    sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    sys.path.insert(0, str(tree))
    done = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True)
    return int(done != EXIT_STATUS_SUCCESS)


if __name__ == "__main__":
    os.chdir(ROOT)
    lay_out(Path(sys.argv[1]).resolve())
    sys.exit(lint_imports(Path(sys.argv[1]).resolve()) if "--lint-imports" in sys.argv else 0)
