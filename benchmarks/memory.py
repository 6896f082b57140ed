"""Measure memory and start-up: peaks of a build and of a run, cold start, import time.

python benchmarks/memory.py [--out DIR]

Peaks are the kernel's maximum resident set size of the process; a run is `specbuild generate`. Cold start is from the
start of the process to the first token on stdout, the median of nine.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common

COMMAND = Path(sys.executable).parent / "specbuild"
PROBE = """
import resource, sys
from specbuild.cli import main
try:
    main()
finally:
    sys.stdout.flush()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=open(sys.argv.pop(), "w"))
"""


def peak(out: Path, *arguments: Any) -> int:
    """Return the peak memory in bytes of one specbuild command."""
    note = out / "peak.txt"
    probe = PROBE.replace("sys.argv.pop()", repr(str(note)))
    subprocess.run([sys.executable, "-c", probe, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)
    return int(note.read_text()) * 1024


def cold_start(bundle: Path) -> float:
    """Return the seconds from the start of the process to the first character of text."""
    command = [COMMAND, "generate", bundle, "-p", "def main(", "-n", "8"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    return seconds


def import_time() -> float:
    """Return the seconds that `import specbuild.runtime` takes in a new process."""
    code = "import time; t = time.perf_counter(); import specbuild.runtime; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Measure and save."""
    out = common.arguments(__doc__).out
    built = common.bundles(out)
    rows: dict[str, Any] = {}
    for name, target in (("pycode", common.PAIR / "target"), ("wide", out / "wide")):
        manifest = json.loads((built[name] / "manifest.json").read_text(encoding="utf-8"))
        plan = json.loads((built[name] / "report.json").read_text(encoding="utf-8"))["memory"]
        fp32 = 4 * manifest["models"]["target"]["parameters"]
        scratch = out / "scratch.bundle"
        build = peak(
            out, "build", "--target", target, "--draft", common.PAIR / "draft", "-o", scratch, "--force", "--no-tune"
        )
        run = peak(out, "generate", built[name], "-p", "def main(" * 40, "-n", "200")
        rows[name] = {
            "build_peak_mb": round(build / 1e6),
            "build_limit_mb": round((2.5 * fp32 + 1.5e9) / 1e6),
            "run_peak_mb": round(run / 1e6),
            "run_limit_mb": round((plan["weights"] + plan["caches_per_sequence"] + 200e6) / 1e6),
            "cold_start_s": round(statistics.median(cold_start(built[name]) for _ in range(9)), 3),
        }
    imports = round(statistics.median(import_time() for _ in range(9)), 3)
    common.save(out, "memory", {"import_runtime_s": imports} | rows)


if __name__ == "__main__":
    main()
