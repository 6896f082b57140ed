"""Compile every kernel for every architecture, report the resources of each, and fail if registers spill.

    python scripts/kernels_report.py                          # NVRTC, from its wheel
    python scripts/kernels_report.py --cuda-arch 90 --out report.json

A kernel's resources are registers per thread and bytes of stack, spills and static shared memory. The exit status is 1
if a kernel spills or a source does not compile, and 2 without NVRTC.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

from specbuild.builder.codegen import nvrtc
from specbuild.builder.targets import architectures
from specbuild.runtime.errors import SpecbuildError

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Write the report and print the spills; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cuda-arch", action="append", metavar="ARCH", help="all nine by default")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "kernels-report.json")
    parser.add_argument("--jobs", type=int, help="compilations at a time, one a core by default")
    options = parser.parse_args()
    started = time.perf_counter()
    try:
        wanted = architectures(options.cuda_arch or ["all"])
        cubins = nvrtc.compile_kernels(wanted, nvrtc.SHAPES, jobs=options.jobs)
    except SpecbuildError as error:
        print(f"kernels_report: {error}", file=sys.stderr)
        return error.exit_status
    spilling = nvrtc.spills(cubins)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = nvrtc.report(cubins) | {"spills": spilling}
    text = re.sub(
        r"\{\s+([^{}]*?)\s+\}", lambda match: "{" + " ".join(match[1].split()) + "}", json.dumps(report, indent=1)
    )
    options.out.write_text(text + "\n", encoding="utf-8")  # a line per kernel
    count = sum(len(table) for table in report["architectures"].values())
    print(f"{count} kernels for {len(wanted)} architectures in {time.perf_counter() - started:.0f} s: {options.out}")
    for line in spilling:
        print(f"spills: {line}")
    return int(bool(spilling))


if __name__ == "__main__":
    sys.exit(main())
