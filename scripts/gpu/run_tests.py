"""Run the tests for a GPU, each file in its own process, so that one that crashes ends no other.

python scripts/gpu/run_tests.py OUT.json [--tool TOOL] [--seconds N] [--jobs N] [--only REGEX] [PYTEST OPTION]...

`--tool` runs each under compute-sanitizer. Files that have not begun when the time is up are listed as left. OUT.json
is rewritten after every file: a row with the numbers of passed, failed and skipped tests, and seconds. OUT.txt has the
output of files with failed or skipped tests. The exit status is 0 if every file was run and nothing failed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/plugins", "tests/runtime")
NEEDS_EXPORTER = {"test_generation.py"}  # a whole generation, which needs the builder's torch
COUNTS = ("passed", "failed", "skipped", "error")
OPTIONS = ("-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs")
FILE_SECONDS = 240


def files() -> list[str]:
    """Return the files with a test marked `gpu` or parametrized over kernels that may be a GPU's."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("test_*.py"))]
    return [
        path.relative_to(ROOT).as_posix()
        for path in found
        if path.name not in NEEDS_EXPORTER
        and re.search(r"mark\.gpu\b|: HostKernels\b", path.read_text(encoding="utf-8"))
    ]


def run(file: str, tool: str | None, seconds: float, options: list[str]) -> tuple[dict[str, Any], str]:
    """Run one file's tests in a process; return its row, and its output if there is something to say.

    Args:
        file: The file, relative to the repository.
        tool: The tool of compute-sanitizer; None to run without it.
        seconds: The time limit.
        options: Further options of pytest.
    """
    command = [sys.executable, "-m", "pytest", *OPTIONS, *options, file]
    if tool:
        # The bindings ask a driver for functions that are newer than it is, and each is refused: no fault of a kernel.
        quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
        sanitizer = ["compute-sanitizer", "--tool", tool, *quiet, "--error-exitcode", "9", "--target-processes", "all"]
        command = [*sanitizer, *command]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(seconds, 1))
        status, text, noise = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        status, text, noise = 124, (error.stdout or b"").decode(errors="replace"), ""
    counts = {name: int(found.group(1)) for name in COUNTS if (found := re.search(rf"(\d+) {name}", text))}
    row = {"file": file, "status": status, **counts, "seconds": round(time.perf_counter() - started, 1)}
    quiet = status in (0, 5) and "skipped" not in counts
    return row, "" if quiet else text[:1500] + text[1500:][-1500:] + noise[:1500]  # crashes report at the beginning


def main() -> int:
    """Run all files, several at a time; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tool", choices=["memcheck", "racecheck"])
    parser.add_argument("--seconds", type=float, default=150, help="after which no file begins, nor goes on")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--only", default="", help="files whose path has this")
    given, options = parser.parse_known_args()
    until = time.perf_counter() + given.seconds
    wanted = [file for file in files() if re.search(given.only, file)]
    tool, rows, outputs, left_out = given.tool or "none", list[dict[str, Any]](), list[str](), list[str]()
    given.out.parent.mkdir(parents=True, exist_ok=True)

    writing = Lock()

    def save() -> None:
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        head = f'{{"tool": {json.dumps(tool)}, "left": {json.dumps(left_out)}, "files": ['
        with writing:
            given.out.write_text(f"{head}\n  {lines}\n]}}\n", encoding="utf-8")
            given.out.with_suffix(".txt").write_text("\n".join(outputs), encoding="utf-8")

    def one(file: str) -> None:
        if (left := until - time.perf_counter()) <= 0:
            left_out.append(file)
        else:
            row, output = run(file, given.tool, min(left, FILE_SECONDS), options)
            rows.append(row)
            outputs.extend([f"== {file}\n{output}"] if output else [])
        save()

    save()
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(one, wanted))
    ran = [each for each in rows if each["status"] != 5]  # 5: none of its tests is for a GPU
    wrong = [each for each in ran if each["status"]]
    passed = sum(each.get("passed", 0) for each in ran)
    print(f"{tool}: {passed} passed in {len(ran)} files, {len(wrong)} with faults, {len(left_out)} left")
    for each in wrong:
        print(f"  {each}")
    return int(bool(wrong or left_out or not ran))


if __name__ == "__main__":
    sys.exit(main())
