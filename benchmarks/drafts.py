"""Bundles of one target with different drafts, prompt by prompt in one process: tokens a second, acceptance, steps.

python benchmarks/drafts.py PROMPTS.jsonl A.bundle B.bundle …   # the model drafts alone; every text must be the same
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.roofline import timed_step

TOKENS, TREES, TEMPERATURES = 96, ("off", "chain:4", "best:5"), (0.0, 0.8)


def main(file: str, *bundles: str) -> None:
    """Print a line for each temperature, tree and bundle, and the draft's step of one node after 256 rows."""
    prompts = [json.loads(line)["prompt"] for line in Path(file).read_text(encoding="utf-8").splitlines()]
    engines = {name: Engine.load(name, drafter="model", threads=1, prefix_caching=False) for name in bundles}
    seconds: dict[tuple[float, str, str], list[float]] = {}
    lengths: dict[tuple[float, str, str], list[float]] = {}
    for prompt in prompts:
        for temperature in TEMPERATURES:
            texts = set()
            for tree in TREES:
                params = SamplingParams(TOKENS, speculation=tree, ignore_eos=True, temperature=temperature, seed=1)
                for name, engine in engines.items():
                    began = time.perf_counter()
                    (result,) = engine.generate([prompt], params)
                    key = temperature, tree, name
                    seconds.setdefault(key, []).append(time.perf_counter() - began)
                    drafting = result.metrics.speculative_decoding
                    lengths.setdefault(key, []).append(1.0 if tree == "off" else drafting.mean_acceptance_length)
                    texts.add(tuple(result.token_ids))
            assert len(texts) == 1, "a draft changed a text"
    for (temperature, tree, name), took in sorted(seconds.items()):
        rate, length = TOKENS * len(took) / sum(took), statistics.mean(lengths[temperature, tree, name])
        gain = sum(seconds[temperature, "off", name]) / sum(took)
        print(
            f"{temperature:g} {tree:8} {name}: {rate:.0f} tokens/s, {gain:.2f} times plain, {length:.2f} tokens a round"
        )
    for name, engine in engines.items():
        with engine.scheduler.exclusive() as loop:
            assert loop.draft_executor
            run = timed_step(loop.draft_executor, 1, 256)
            print(f"{name}: a step of the draft {statistics.median(run() for _ in range(300)) * 1e6:.1f} us")


if __name__ == "__main__":
    main(*sys.argv[1:])
