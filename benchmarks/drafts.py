"""Compare bundles of one target with different drafts in one process: tokens per second, acceptance, step times.

python benchmarks/drafts.py PROMPTS.jsonl A.bundle B.bundle …   # the model drafts alone; every text must be the same
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

from specbuild.measure.roofline import timed_step
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.speculation.timings import processor

TOKENS, TREES, TEMPERATURES = 96, ("off", "chain:4", "best:5"), (0.0, 0.8)


def main(file: Path, bundles: list[str], out: Path | None) -> None:
    """Print a line for each temperature, tree and bundle, and each draft's time of a one-node step after 256 rows."""
    prompts = [json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines()]
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
    empty: dict[str, dict[str, float]] = {"tokens_a_second": {}, "tokens_a_round": {}}
    found: dict[str, dict[str, dict[str, float]]] = {name: copy.deepcopy(empty) for name in bundles}
    for (temperature, tree, name), took in sorted(seconds.items()):
        rate, length = TOKENS * len(took) / sum(took), statistics.mean(lengths[temperature, tree, name])
        gain = sum(seconds[temperature, "off", name]) / sum(took)
        print(
            f"{temperature:g} {tree:8} {name}: {rate:.0f} tokens/s, {gain:.2f} times plain, {length:.2f} tokens a round"
        )
        found[name]["tokens_a_second"][f"{tree}, {temperature:g}"] = round(rate, 1)
        found[name]["tokens_a_round"][f"{tree}, {temperature:g}"] = round(length, 3)
    steps = {}
    for name, engine in engines.items():
        with engine.scheduler.exclusive() as loop:
            assert loop.draft_executor
            run = timed_step(loop.draft_executor, 1, 256)
            steps[name] = round(statistics.median(run() for _ in range(300)) * 1e6, 1)
            print(f"{name}: a step of the draft {steps[name]} us")
    about = {"command": " ".join(sys.argv), "prompts": len(prompts), "new_tokens": TOKENS, "threads": 1}
    about |= {"processor": processor(), "onnxruntime": version("onnxruntime")}
    if out:
        out.write_text(json.dumps(about | {"step_us": steps, "bundles": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("bundles", nargs="+")
    parser.add_argument("--out", type=Path, help="JSON with all of it")
    arguments = parser.parse_args()
    main(arguments.prompts, arguments.bundles, arguments.out)
