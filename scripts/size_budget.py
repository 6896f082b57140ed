"""Keep the core small: lines of Python and CUDA against their budgets, and files against 300 lines each."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_BUDGET, CUDA_BUDGET, FILE_LIMIT = 6000, 2000, 300


def main() -> int:
    """Print the counts; the exit status is 1 where a budget is exceeded."""
    python = [p for folder in ("builder", "runtime") for p in (ROOT / folder).rglob("*.py")]
    cuda = [p for suffix in ("*.cu", "*.cuh", "*.h", "*.cpp") for p in (ROOT / "plugins").rglob(suffix)]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python + cuda}
    totals = sum(lines[p] for p in python), sum(lines[p] for p in cuda)
    print(f"Python {totals[0]} of {PYTHON_BUDGET} lines, CUDA {totals[1]} of {CUDA_BUDGET}")
    long = sorted((count, path) for path, count in lines.items() if count > FILE_LIMIT)
    for count, path in long:
        print(f"{path.relative_to(ROOT)} has {count} lines, more than {FILE_LIMIT}")
    return int(bool(long) or totals[0] > PYTHON_BUDGET or totals[1] > CUDA_BUDGET)


if __name__ == "__main__":
    sys.exit(main())
