"""Shared by the benchmarks: facts on the machine, the bundles, the result file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specbuild.runtime.speculation.timings import processor

ROOT = Path(__file__).resolve().parent.parent
PAIR = ROOT / "engines" / "pycode"
PROMPTS = ROOT / "measure" / "bench" / "pycode.jsonl"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option `--out`, which all benchmarks have."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "out", help="folder for results and bundles")
    return found


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the arguments of a benchmark with no option but `--out`."""
    return parser(description).parse_args()


def prompts() -> list[str]:
    """Return real prompts on which the reference pair was not trained."""
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def bundles(out: Path) -> dict[str, Path]:
    """Return the bundles of the reference pair and of the widened target by name; build missing ones."""
    out.mkdir(parents=True, exist_ok=True)
    wide = out / "wide"
    if not wide.is_dir():
        script = ROOT / "scripts" / "inflate_checkpoint.py"
        command = [sys.executable, script, PAIR / "target", wide, "--like", "intermediate=20480"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    built = {}
    for name, target in (("pycode", PAIR / "target"), ("wide", wide)):
        built[name] = out / f"{name}.bundle"
        if not built[name].is_dir():
            specbuild("build", "--target", target, "--draft", PAIR / "draft", "-o", built[name], "--no-tune")
    return built


def specbuild(*arguments: Any) -> None:
    """Run the command line of this environment."""
    subprocess.run([Path(sys.executable).parent / "specbuild", *map(str, arguments)], check=True, stdout=sys.stderr)


def machine() -> dict[str, Any]:
    """Return facts on the machine, the versions and the command of a measurement."""
    names = ("specbuild-trt", "onnxruntime", "torch", "transformers", "numpy")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
        "commit": commit.strip(),
        "command": " ".join(["python", *sys.argv]),
    }


def save(out: Path, name: str, result: dict[str, Any]) -> None:
    """Write a result and print it."""
    text = json.dumps({"machine": machine()} | result, indent=2)
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(text)
