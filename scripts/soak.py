"""Run the soak tests, which take long, and write their results as JSON, to be committed.

python scripts/soak.py --out benchmarks/results/soak.json [--jobs 2]

The soak tests cover every model family on 32 prompts, every family's engines, and property tests with 2,000 cases each.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("specbuild-trt", "onnxruntime", "torch", "transformers", "tensorrt-rtx", "hypothesis", "pytest")


def main() -> int:
    """Run the tests, write the results, and return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", default="2")
    options = parser.parse_args()
    command = ["-m", "pytest", "--tier", "soak", "-n", options.jobs, "--dist", "loadfile", "--no-loadscope-reorder"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        done = subprocess.run([sys.executable, *command, f"--junitxml={report}"], cwd=ROOT)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    result = {
        "date": date.today().isoformat(),
        "command": "python " + " ".join(command),
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip(),
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
        "versions": {name: version(name) for name in VERSIONS},
        "seconds": round(time.monotonic() - began),
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
        "by_file": {},
    }
    for case in cases:
        counts = result["by_file"].setdefault(case.get("classname"), {"tests": 0, "seconds": 0.0})
        counts["tests"] += 1
        counts["seconds"] = round(counts["seconds"] + float(case.get("time", 0)), 1)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
