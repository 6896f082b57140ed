"""Run `specbuild bench`, and keep a row of figures for each of its runs.

python -m benchmarks.cpu.bench BUNDLE --out FILE [OPTION OF specbuild bench …]
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import machine, parser, save, specbuild

FIGURES = (
    *("concurrency", "speculation", "completed", "outputs_equal_to_baseline", "output_throughput"),
    *("mean_ttft_ms", "p50_itl_ms", "p99_itl_ms"),
)
SETTINGS = ("max_new_tokens", "temperature", "ignore_eos", "prompts", "num_prompts", "drafter", "threads")


def row(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run's figures; speedups have their interval, and a round its time on the host."""
    found = {name: run[name] for name in FIGURES}
    for name in ("wall_speedup", "decode_speedup"):
        found[name] = [run[name][part] for part in ("value", "low", "high")] if run[name] else None
    drafting = run["speculative_decoding"]
    found["acceptance_length"] = drafting and drafting["mean_acceptance_length"]
    return found | {"host_ms": run["round"]["host_ms"], "round_ms": run["round"]["total_ms"]}


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a report of `specbuild bench`."""
    bundle = report["bundle"]
    return {
        "bundle": {name: bundle[name] for name in ("path", "digest", "backend", "default_tree")},
        "models": {name: f"{each['parameters']} in {each['precision']}" for name, each in bundle["models"].items()},
        "settings": {name: report["settings"][name] for name in SETTINGS},
        "runs": [row(run) for run in report["runs"]],
    }


def main() -> None:
    """Run it, and write and print the rows."""
    options = parser(__doc__, None)
    options.add_argument("bundle", type=Path)
    given, more = options.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        specbuild("bench", given.bundle, "-o", report, *more)
        print(save(given.out, {"machine": machine()} | summary(json.loads(report.read_text()))))


if __name__ == "__main__":
    main()
