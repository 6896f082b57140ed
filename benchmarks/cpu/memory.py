"""Measure memory and start-up: peaks of a build and of a run, cold start, import time.

python -m benchmarks.cpu.memory [--out FILE]

Peaks are the kernel's maximum resident set size of the process; a run is `specbuild generate`. Cold start is from the
start of the process to the first token on stdout, the median of nine. Bundles are kept in benchmarks/out.
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

from benchmarks.common import COMMAND, OUT, PAIR, bundles, machine, parser, save

TRIALS = 9
PROBE = """
import resource, sys
from specbuild.cli import main
try:
    main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
IMPORT = "import time; t = time.perf_counter(); import specbuild.runtime; print(time.perf_counter() - t)"


def peak_mb(*arguments: Any) -> int:
    """Return the peak memory in MB of one specbuild command, as its process has it at its end."""
    command = [sys.executable, "-c", PROBE, *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return round(int(done.stdout.split()[-1]) * 1024 / 1e6)


def cold_start(bundle: Path) -> float:
    """Return the seconds from the start of the process to the first character of text."""
    command = [COMMAND, "generate", str(bundle), "-p", "def main(", "-n", "8"]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
    return seconds


def import_time() -> float:
    """Return the seconds that `import specbuild.runtime` takes in a new process."""
    return float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout)


def measure(bundle: Path, target: Path) -> dict[str, Any]:
    """Return a bundle's row: peaks of a build and of a run with what they may be, and its cold start."""
    manifest, report = (json.loads((bundle / f"{name}.json").read_text()) for name in ("manifest", "report"))
    plan, fp32 = report["memory"], 4 * manifest["models"]["target"]["parameters"]
    pair = "--target", target, "--draft", PAIR / "draft"
    return {
        "build_peak_mb": peak_mb("build", *pair, "-o", OUT / "scratch.bundle", "--force", "--no-tune"),
        "build_limit_mb": round((2.5 * fp32 + 1.5e9) / 1e6),
        "run_peak_mb": peak_mb("generate", bundle, "-p", "def main(" * 40, "-n", "200"),
        "run_limit_mb": round((plan["weights"] + plan["caches_per_sequence"] + 200e6) / 1e6),
        "cold_start_s": statistics.median(cold_start(bundle) for _ in range(TRIALS)),
    }


def main() -> None:
    """Measure both bundles, and write and print their rows."""
    given, built = parser(__doc__, OUT / "memory.json").parse_args(), bundles(OUT)
    targets = {"pycode": PAIR / "target", "wide": OUT / "wide"}
    rows = {name: measure(built[name], target) for name, target in targets.items()}
    imports = statistics.median(import_time() for _ in range(TRIALS))
    print(save(given.out, {"machine": machine(), "import_runtime_s": imports} | rows))


if __name__ == "__main__":
    main()
