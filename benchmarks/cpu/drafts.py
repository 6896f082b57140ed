"""Compare bundles of one target with different drafts in one process: tokens per second, acceptance, step times.

python -m benchmarks.cpu.drafts PROMPTS.jsonl A.bundle B.bundle … [--out FILE]

The model drafts alone. A row has a bundle, a temperature and a tree; every text must be the same.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.common import OUT, machine, parser, save
from specbuild.measure.roofline import timed_step
from specbuild.runtime import Engine, SamplingParams

TOKENS, TREES, TEMPERATURES = 96, ("off", "chain:4", "best:5"), (0.0, 0.8)
ROWS, STEPS = 256, 300  # committed rows of the draft's timed step, and how often it is taken
Runs = dict[tuple[str, str, float], list[tuple[float, float]]]  # seconds and tokens a round, by bundle, tree, heat


def decode(engines: dict[str, Engine], prompt: str, found: Runs) -> None:
    """Decode a prompt with every bundle, tree and temperature; raise an error if a draft changes a text."""
    for temperature in TEMPERATURES:
        texts = set()
        for tree, (name, engine) in itertools.product(TREES, engines.items()):
            params = SamplingParams(TOKENS, speculation=tree, ignore_eos=True, temperature=temperature, seed=1)
            began = time.perf_counter()
            (result,) = engine.generate([prompt], params)
            seconds = time.perf_counter() - began
            assert result.metrics
            length = result.metrics.speculative_decoding.mean_acceptance_length
            found.setdefault((name, tree, temperature), []).append((seconds, 1.0 if tree == "off" else length))
            texts.add(tuple(result.token_ids))
        if len(texts) != 1:
            raise RuntimeError(f"a draft changed the text after {prompt!r}")


def step_us(engine: Engine) -> float:
    """Return the median microseconds of a step of the draft with one node."""
    with engine.scheduler.exclusive() as loop:
        assert loop.draft_executor
        run = timed_step(loop.draft_executor, 1, ROWS)
        return statistics.median(run() for _ in range(STEPS)) * 1e6


def main() -> None:
    """Decode all prompts; write and print a row for each bundle, tree and temperature."""
    options = parser(__doc__, OUT / "drafts.json")
    options.add_argument("prompts", type=Path)
    options.add_argument("bundles", nargs="+")
    given = options.parse_args()
    texts = [json.loads(line)["prompt"] for line in given.prompts.read_text(encoding="utf-8").splitlines()]
    engines = {name: Engine.load(name, drafter="model", threads=1, prefix_caching=False) for name in given.bundles}
    found, rows = Runs(), dict[str, dict[str, Any]]()
    for text in texts:
        decode(engines, text, found)
    for (name, tree, temperature), runs in found.items():
        seconds = {key: sum(second for second, _ in found[name, key, temperature]) for key in (tree, "off")}
        rows.setdefault(name, {"step_us": step_us(engines[name])})[f"{tree}, {temperature:g}"] = {
            "tokens_a_second": TOKENS * len(runs) / seconds[tree],
            "over_plain": seconds["off"] / seconds[tree],
            "tokens_a_round": statistics.mean(length for _, length in runs),
        }
    about = {"prompts": len(texts), "new_tokens": TOKENS, "threads": 1}
    print(save(given.out, {"machine": machine()} | about | {"bundles": rows}))


if __name__ == "__main__":
    main()
