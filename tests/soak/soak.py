"""Run the soak tests, which take long, and write a row for each of their folders, to be committed.

PYTHONPATH=.:tests/support python tests/soak/soak.py --out benchmarks/results/soak.json [--jobs 2]

The soak tests cover every model family on 32 prompts, every family's engines, and property tests with 2,000 cases each.
"""

import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.common import ROOT, machine, parser, save


def main():
    """Run the tests, write the results, and return pytest's exit status."""
    asked = parser(__doc__, None)
    asked.add_argument("--jobs", default="2")
    options = asked.parse_args()
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
        "machine": machine(),
        "seconds": round(time.monotonic() - began),
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
        "by_folder": {},
    }
    for case in cases:
        folder = ".".join((case.get("classname") or "").split(".")[:2])
        counts = result["by_folder"].setdefault(folder, {"tests": 0, "seconds": 0.0})
        counts["tests"] += 1
        counts["seconds"] = round(counts["seconds"] + float(case.get("time", 0)), 1)
    save(options.out, result)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
