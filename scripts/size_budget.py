"""Keep the core small: lines of code against their budgets, and files against 300 lines each.

Code is what is left of a Python file without blank lines, comments and docstrings, which nobody should save on; of
CUDA, without blank lines and comment lines. A file's 300 lines are all of its lines.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_BUDGET, CUDA_BUDGET, FILE_LIMIT = 6000, 2000, 300
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
    python = [p for folder in ("builder", "runtime") for p in (ROOT / folder).rglob("*.py")]
    cuda = [p for suffix in ("*.cu", "*.cuh", "*.h", "*.cpp") for p in (ROOT / "plugins").rglob(suffix)]
    texts = {path: path.read_text(encoding="utf-8") for path in python + cuda}
    totals = sum(python_lines(texts[p]) for p in python), sum(cuda_lines(texts[p]) for p in cuda)
    print(f"Python {totals[0]} of {PYTHON_BUDGET} lines of code, CUDA {totals[1]} of {CUDA_BUDGET}")
    long = sorted((len(text.splitlines()), path) for path, text in texts.items() if len(text.splitlines()) > FILE_LIMIT)
    for count, path in long:
        print(f"{path.relative_to(ROOT)} has {count} lines, more than {FILE_LIMIT}")
    return int(bool(long) or totals[0] > PYTHON_BUDGET or totals[1] > CUDA_BUDGET)


if __name__ == "__main__":
    sys.exit(main())
