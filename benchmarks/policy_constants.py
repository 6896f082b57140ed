"""Evaluate the policy's constants by simulation: recorded texts, a bundle's timing table, batches and loads.

python benchmarks/policy_constants.py BUNDLE … --out FILE [--prompts 12] [--tokens 96]

Each bundle decodes its texts plainly; for every position it is recorded how many tokens lookup and the draft would get
accepted there (`measure/simulate.py`). Then each constant is varied alone. `mean` is the geometric mean of the speedups
over plain decoding of all bundles, batch sizes and temperatures under one load, `worst` the smallest of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import machine, prompts

from specbuild.measure.simulate import Machine, Position, Simulator, busy, positions, quiet
from specbuild.measure.tuning.decode import OFF, Decoder
from specbuild.runtime import Engine
from specbuild.runtime.speculation import batch, live, policy
from specbuild.runtime.speculation.timings import TimingTable

BATCHES = (1, 2, 4)
TEMPERATURES = (0.0, 0.8)
ROUNDS = 600
LOADS: dict[str, Machine] = {
    "quiet": quiet,
    "noisy": busy(0.0, noise=0.25),
    "a core busy from the middle on": busy(0.1, since=ROUNDS // 2, noise=0.1),
}
VARIED: dict[str, tuple[tuple[Any, ...], tuple[float, ...]]] = {
    "MARGIN": ((policy, batch), (1.0, 1.05, 1.1, 1.15, 1.25, 1.4)),
    "OWN": ((live,), (1, 3, 5, 9)),
    "SHRINK": ((live,), (0.0, 0.25, 1.0, 4.0)),
    "FRESH": ((live,), (32, 64, 128, 256)),
    "ADRIFT": ((live,), (0.05, 0.1, 0.2, 9.0)),
}
Recorded = list[tuple[TimingTable, bool, int, dict[float, list[list[Position]]]]]


def record(path: Path, count: int, tokens: int) -> tuple[TimingTable, bool, int, dict[float, list[list[Position]]]]:
    """Return a bundle's timing table, whether it has a draft, its free rows, and its recorded texts by temperature."""
    found = dict[float, list[list[Position]]]()
    with Engine.load(path, batch_size=1, prefix_caching=False) as engine, engine.scheduler.exclusive() as loop:
        decoder, drafts = Decoder(engine, loop, tokens), "draft" in engine.manifest.models
        for temperature in TEMPERATURES:
            texts = found[temperature] = []
            for prompt in prompts()[:count]:
                given = engine.tokenizer.encode(prompt)
                decoded = decoder.decode(given, OFF, temperature)
                seen = decoder.replay(decoded, "best:16", every=True) if drafts else []
                levels = [0, *(len(accepted) for each in seen for _, accepted in each.orders)]
                texts.append(positions(decoded.text.tokens, len(given), levels))
        free = loop.exactness.rows - 1 if loop.exactness else 0
        assert engine.timings, "tune the bundle first"
        return engine.timings, drafts, free, found


def speedups(recorded: Recorded, load: Machine, on: bool = True) -> Iterator[float]:
    """Yield the speedup of each bundle, batch size and temperature; `on`: whether live timings correct the table."""
    for table, drafts, free, texts in recorded:
        for size in BATCHES:
            for temperature in TEMPERATURES:
                simulator = Simulator(table, size, load, on, free)
                yield simulator.run(texts[temperature], drafts, temperature, ROUNDS).speedup


def told(found: list[float]) -> dict[str, float]:
    """Return the geometric mean and the minimum."""
    return {"mean": round(statistics.geometric_mean(found), 3), "worst": round(min(found), 3)}


def main() -> None:
    """Record the texts, vary the constants, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    asked = parser.parse_args()
    recorded = [record(path, asked.prompts, asked.tokens) for path in asked.bundles]
    result: dict[str, Any] = {"bundles": [path.name for path in asked.bundles], "loads": {}}
    for name, load in LOADS.items():
        found: dict[str, Any] = {"as it is": told([*speedups(recorded, load)])}
        found["by the table alone"] = told([*speedups(recorded, load, on=False)])
        for constant, (modules, values) in VARIED.items():
            kept = getattr(modules[0], constant)
            for value in values:
                for module in modules:
                    setattr(module, constant, value)
                found[f"{constant}={value}"] = told([*speedups(recorded, load)])
            for module in modules:
                setattr(module, constant, kept)
        result["loads"][name] = found
        print(name, json.dumps(found, indent=1), flush=True)
    asked.out.write_text(json.dumps({"machine": machine()} | result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
