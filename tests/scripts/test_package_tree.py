"""The sources as a package: a folder that holds anything else is left as it is."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_only_an_older_tree_is_replaced(tmp_path):
    command = [sys.executable, str(ROOT / "scripts/release/package_tree.py"), str(tmp_path)]
    for _ in range(2):
        assert subprocess.run(command).returncode == 0
        assert (tmp_path / "specbuild/cli/generate.py").samefile(ROOT / "cli/generate.py")
    (tmp_path / "mine.txt").write_text("mine")
    refused = subprocess.run(command, capture_output=True, text=True)
    assert (refused.returncode, (tmp_path / "mine.txt").read_text()) == (1, "mine")
    assert "no older tree" in refused.stderr
