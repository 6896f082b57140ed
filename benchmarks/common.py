"""Shared by the benchmarks: options, prompts, bundles, servers, turns, statistics, facts on the machine, results."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from specbuild.runtime.backends.cpu.machine import processor

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "out"
PAIR = ROOT / "engines" / "pycode"
PROMPTS = ROOT / "measure" / "bench" / "pycode.jsonl"
COMMAND = str(Path(sys.executable).parent / "specbuild")
PACKAGES = (
    *("specbuild-trt", "onnxruntime", "onnxruntime-gpu", "torch", "transformers", "numpy"),
    *("tensorrt", "tensorrt-rtx-cu13", "cuda-core", "cuda-bindings"),
)
GPU = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw"
RESAMPLES = 2000  # of a bootstrap interval
WIDTH = 300  # the longest row of a result, in characters
DIGITS = 4  # of a number in a result
STARTED = 300.0  # seconds in which a server must have started, Ray's too
T = TypeVar("T")


def parser(description: str | None, out: Path | None = OUT) -> argparse.ArgumentParser:
    """Return a parser with the option `--out`, which every benchmark has; without a default it is required."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, default=out, required=out is None, help="file or folder of the result")
    return found


def prompts() -> list[str]:
    """Return real prompts on which the reference pair was not trained."""
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def chats() -> list[str]:
    """Return prompts of several kinds, for a model that follows instructions."""
    lines = (ROOT / "tests" / "data" / "kinds.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [each.get("prompt") or each["messages"][0]["content"] for each in found]


def bundles(out: Path) -> dict[str, Path]:
    """Return the bundles of the reference pair and of the widened target by name; build missing ones."""
    out.mkdir(parents=True, exist_ok=True)
    wide = out / "wide"
    if not wide.is_dir():
        script = ROOT / "scripts" / "checkpoints" / "inflate.py"
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
    subprocess.run([COMMAND, *map(str, arguments)], check=True, stdout=sys.stderr)


class Server:
    """A server in a process of its own; `url`: its address, `lines`: the entries of its log."""

    def __init__(self, bundle: Path, *flags: str) -> None:
        command = [COMMAND, "serve", str(bundle), "--port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines, self.url, self._there = list[dict[str, Any]](), "", threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._there.wait(STARTED) or not self.url:
            self.process.kill()
            raise RuntimeError(f"the server did not start: {self.lines[-1:]}")

    def _read(self) -> None:
        for line in self.process.stderr or ():
            if line.startswith("{"):
                self.lines.append(entry := json.loads(line))
                if entry.get("message", "").startswith("serving at "):
                    self.url = entry["message"].removeprefix("serving at ")
                    self._there.set()
        self._there.set()


@contextmanager
def serving(bundle: Path, *flags: str) -> Iterator[Server]:
    """Yield a server that ends with the block."""
    server = Server(bundle, *flags)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(60)


def in_turns(ways: Mapping[str, Callable[[], T]], turns: int) -> dict[str, list[T]]:
    """Return what each way gave in each turn, after a turn that warms up; every second turn has the reverse order."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name in list(ways)[:: (-1) ** turn]:
            value = ways[name]()
            if turn:
                found[name].append(value)
    return found


def median_ratios(rows: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return by name the median of the turns' ratios of one contender's figures over another's."""
    pairs = list(zip(rows, others, strict=True))
    return {name: statistics.median(one[name] / other[name] for one, other in pairs) for name in rows[0]}


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of the values."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def bootstrap(loads: Sequence[Sequence[Any]], statistic: Callable[[Sequence[Any]], float]) -> list[float]:
    """Return the 95 % bootstrap interval of a statistic of all loads' items.

    Whole loads are drawn, because the pairs of one load are alike: a load may be a tenth faster than the next.
    """
    drawn, flat = random.Random(0), itertools.chain.from_iterable
    found = sorted(statistic(list(flat(drawn.choices(loads, k=len(loads))))) for _ in range(RESAMPLES))
    return [found[int(RESAMPLES * share)] for share in (0.025, 0.975)]


def interval(loads: Sequence[Sequence[float]]) -> list[float]:
    """Return the 95 % bootstrap interval of the geometric mean of the ratios of all loads' pairs."""
    return bootstrap(loads, statistics.geometric_mean)


def output(*command: str) -> str:
    """Return what a tool prints; "" if the tool is not installed."""
    if not shutil.which(command[0]):
        return ""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that decide a measurement."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Return facts on the machine, the versions and the command of a measurement."""
    gpu = output("nvidia-smi", f"--query-gpu={GPU}", "--format=csv,noheader")
    module = sys.modules["__main__"].__spec__
    command = ["python", *(["-m", module.name] if module else sys.argv[:1]), *sys.argv[1:]]
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        **({"gpu": gpu} if gpu else {}),
        "python": platform.python_version(),
        "versions": versions(),
        "commit": output("git", "rev-parse", "--short", "HEAD"),
        "command": " ".join(command),
    }


def rounded(value: Any) -> Any:
    """Return a result whose numbers have four digits."""
    if isinstance(value, Mapping):
        return {str(key): rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def rows(value: Any, indent: int = 0) -> str:
    """Return a result as JSON, a row a line: what fits in a line stands in one."""
    line = json.dumps(value, ensure_ascii=False)
    if indent + len(line) <= WIDTH or not value or not isinstance(value, dict | list):
        return line
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {rows(each, indent + 1)}" for key, each in value.items()]
    else:
        parts = [rows(each, indent + 1) for each in value]
    inner = ",\n".join(" " * (indent + 1) + part for part in parts)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n{inner}\n{' ' * indent}{end}"


def save(out: Path, result: Mapping[str, Any]) -> str:
    """Write a result, whole or not at all, and return its text."""
    text = rows(rounded(result))
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    part.write_text(f"{text}\n", encoding="utf-8")
    part.replace(out)
    return text
