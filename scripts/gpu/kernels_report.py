"""Compile every kernel for every architecture, report the resources of each, and fail if registers spill.

    python -m scripts.gpu.kernels_report                          # NVRTC, from its wheel
    python -m scripts.gpu.kernels_report --cuda-arch 90 --out report.json

A kernel's row has registers per thread and bytes of stack, spills and static shared memory: a list has a number for
each architecture, one number is that of all. The exit status is 1 if a kernel spills or a source does not compile, and
2 without NVRTC.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, save
from specbuild.builder.codegen import nvrtc
from specbuild.builder.targets import architectures
from specbuild.runtime.errors import SpecbuildError


def by_kernel(report: dict[str, Any]) -> dict[str, Any]:
    """Return a row for each kernel: each of its resources by architecture, or once if all have the same."""
    tables = report["architectures"]
    rows: dict[str, dict[str, Any]] = {}
    for kernel in dict.fromkeys(name for table in tables.values() for name in table):
        uses = [table.get(kernel, {}) for table in tables.values()]
        values = {name: [use.get(name) for use in uses] for name in next(filter(None, uses))}
        rows[kernel] = {name: each[0] if len(set(each)) == 1 else each for name, each in values.items()}
    return {"compiler": report["compiler"], "architectures": list(tables), "kernels": rows}


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
        cubins = nvrtc.compile_kernels(wanted, [*nvrtc.SHAPES, *nvrtc.PRODUCTS], jobs=options.jobs)
    except SpecbuildError as error:
        print(f"kernels_report: {error}", file=sys.stderr)
        return error.exit_status
    spilling = nvrtc.spills(cubins)
    report = by_kernel(nvrtc.report(cubins))
    save(options.out, report | {"spills": spilling})
    seconds = time.perf_counter() - started
    print(f"{len(report['kernels'])} kernels for {len(wanted)} architectures in {seconds:.0f} s: {options.out}")
    for line in spilling:
        print(f"spills: {line}")
    return int(bool(spilling))


if __name__ == "__main__":
    sys.exit(main())
