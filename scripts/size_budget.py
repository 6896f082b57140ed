"""Check the code's size: lines of code in each folder against its budget, and every file against 300 lines.

Lines of code exclude blank lines, comments and (in Python) docstrings, on which nobody should save. The code that lets
tests run the kernels on a CPU is in tests/ and not counted. The limit of 300 lines counts all lines of a file. A file
counts for the longest folder in BUDGETS that contains it.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LIMIT = 300
BUDGETS = {  # lines of code by folder and suffixes
    ("builder", ".py"): 5529,
    ("builder/distill", ".py"): 1404,
    ("builder/quantize", ".py"): 1435,
    ("cli", ".py"): 2648,
    ("face", ".py"): 37,
    ("measure", ".py"): 2264,
    ("runtime", ".py"): 6817,
    ("runtime/backends", ".py"): 2920,
    ("runtime/decoding", ".py"): 2033,
    ("serve", ".py"): 6393,
    ("plugins", ".cu .cuh"): 2163,  # the kernels
    ("plugins", ".h .cpp"): 706,  # the kernels' C interface, and the plugin
}
_BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def python_lines(text: str) -> int:
    """Return the number of lines of code in a Python file."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _BLANK:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def cuda_lines(text: str) -> int:
    """Return the number of lines that are neither blank nor comments in a CUDA or C++ file."""
    return sum(bool(line.strip()) and not line.strip().startswith(("//", "/*", "*")) for line in text.splitlines())


def main() -> int:
    """Print the counts; return the exit status, 1 if a budget or a file's limit is exceeded."""
    counts, long = dict.fromkeys(BUDGETS, 0), list[str]()
    for top in sorted({folder.split("/")[0] for folder, _ in BUDGETS}):
        for path in sorted((ROOT / top).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            rooms = [key for key in BUDGETS if name.startswith(f"{key[0]}/") and path.suffix in key[1].split()]
            if not rooms:
                continue
            text = path.read_text(encoding="utf-8")
            counts[max(rooms)] += python_lines(text) if path.suffix == ".py" else cuda_lines(text)
            if len(text.splitlines()) > FILE_LIMIT:
                long.append(f"{name} has {len(text.splitlines())} lines, more than {FILE_LIMIT}")
    told = [f"{folder} {suffixes} {counts[folder, suffixes]} of {most}" for (folder, suffixes), most in BUDGETS.items()]
    print("Lines of code:", ", ".join(told))
    print(*long, sep="\n", end="\n" if long else "")
    return int(bool(long) or any(lines > BUDGETS[key] for key, lines in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
