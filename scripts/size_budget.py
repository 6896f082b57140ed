"""Keep the core small: lines of code against their budgets, and files against 300 lines each.

Code is what is left of a Python file without blank lines, comments and docstrings, which nobody should save on; of
CUDA and C++, without blank lines and comment lines. What lets the tests run the kernels on a CPU is in tests/. A file's
300 lines are all of its lines. The core is what compiles and decodes; the command line, what measures, what makes
numbers narrower and says what that cost, what makes, fits and judges drafts, and what drives devices (memory, streams,
graphs, plans, cubins, rounds on them) are counted apart.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE_BUDGET, CLI_BUDGET, BENCH_BUDGET, DEVICE_BUDGET, CUDA_BUDGET, SHIM_BUDGET = 6000, 1400, 1200, 2840, 2000, 700
QUANTIZE_BUDGET, DRAFTS_BUDGET = 1290, 2150
FILE_LIMIT = 300
PARTS = {  # of the Python code, by how their paths begin; all else is the core
    "command line": ("cli/",),
    "measuring": ("measure/bench/", "measure/tuning/", "measure/roofline.py", "builder/products.py"),
    "quantizing": ("builder/quantize/", "builder/calibrate.py", "builder/rounding.py", "builder/lower/quantized.py"),
    "drafts": (
        *("builder/distill/", "builder/pair/", "builder/vocabulary.py", "builder/eagle.py", "builder/taps.py"),
        *("builder/loading.py", "builder/passes/spread_logits.py"),
        *(f"runtime/drafting/{name}.py" for name in ("eagle3", "pard", "factory")),
    ),
    "devices": (
        "runtime/backends/gpu/",
        "runtime/backends/kernels/",
        "runtime/decoding/device/",
        "runtime/engine/load_gpu.py",
    ),
}
_BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def python_lines(text: str) -> int:
    """Lines with code on them."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _BLANK:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def cuda_lines(text: str) -> int:
    """Lines that are neither blank nor a comment's."""
    return sum(bool(line.strip()) and not line.strip().startswith(("//", "/*", "*")) for line in text.splitlines())


def main() -> int:
    """Print the counts; the exit status is 1 where a budget is exceeded."""
    python = [p for folder in ("cli", "builder", "measure", "runtime") for p in (ROOT / folder).rglob("*.py")]
    kernels = [p for suffix in ("*.cu", "*.cuh") for p in (ROOT / "plugins").rglob(suffix)]
    shim = [p for suffix in ("*.h", "*.cpp") for p in (ROOT / "plugins").rglob(suffix)]
    texts = {path: path.read_text(encoding="utf-8") for path in python + kernels + shim}
    parts = dict.fromkeys(("core", *PARTS), 0)
    for path in python:
        name = path.relative_to(ROOT).as_posix()
        parts[next((part for part, begins in PARTS.items() if name.startswith(begins)), "core")] += python_lines(
            texts[path]
        )
    counted = (
        ("Python core", parts["core"], CORE_BUDGET),
        ("command line", parts["command line"], CLI_BUDGET),
        ("measuring", parts["measuring"], BENCH_BUDGET),
        ("quantizing", parts["quantizing"], QUANTIZE_BUDGET),
        ("drafts", parts["drafts"], DRAFTS_BUDGET),
        ("devices", parts["devices"], DEVICE_BUDGET),
        ("CUDA", sum(cuda_lines(texts[p]) for p in kernels), CUDA_BUDGET),
        ("C interface and TensorRT plugin", sum(cuda_lines(texts[p]) for p in shim), SHIM_BUDGET),
    )
    print("Lines of code:", ", ".join(f"{name} {lines} of {budget}" for name, lines, budget in counted))
    long = sorted((len(text.splitlines()), path) for path, text in texts.items() if len(text.splitlines()) > FILE_LIMIT)
    for count, path in long:
        print(f"{path.relative_to(ROOT)} has {count} lines, more than {FILE_LIMIT}")
    return int(bool(long) or any(lines > budget for _, lines, budget in counted))


if __name__ == "__main__":
    sys.exit(main())
