"""Hold `auto` against plain decoding: tokens, and rates in turns, alone and batched, as loaded and resident.

python benchmarks/auto_on_gpu.py BUNDLE [--batches 1,4] [--code] [--out FILE.json]

Eight prompts, 96 tokens each, greedy and at temperature 0.8 with seeds; with --code they are pycode's. A turn of its
own salt finds nothing of another turn. The first turn warms up: it is listed, and not among those whose ratios' median
is `ratio`. Also milliseconds to the first token of the first prompt and of one of 512 tokens. Resident rounds are
measured where the bundle's backend has them. For a model that was trained.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common import prompts

from engines import first_token, machine
from specbuild.measure.exactness import compare, plain
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.decoding.device.loop import DeviceLoop

TOKENS, TURNS = 96, 4
PROMPTS = (
    "The history of the steam engine begins with",
    "List the planets of the solar system with one fact about each:\n1.",
    "Question: Why is the sky blue?\nAnswer:",
    "Rewrite the sentence in the passive voice: The cat chased the mouse.\n",
    "def quicksort(items):\n",
    "Once upon a time there was a",
    '{"name": "Alice", "age": 30, "city":',
    "Translate to French: Good morning, how are you?\n",
)


def measure(engine: Engine, texts: list[list[int]], found: dict[str, Any]) -> None:
    """Fill in `found`: what no graph holds, the comparisons, the rates of each turn, and what `auto` decided in all."""
    greedy = [SamplingParams(max_new_tokens=TOKENS, seed=i, ignore_eos=True) for i in range(len(texts))]
    exactness = getattr(engine._loop, "exactness", None)
    found |= {"class": exactness and asdict(exactness), "notes": list(engine.notes), "cases": [], "rates": {}}
    for name, temperature in ("greedy", 0.0), ("temperature 0.8", 0.8):
        params = [replace(each, temperature=temperature, cache_salt="tokens") for each in greedy]
        drafting = [replace(each, speculation="auto") for each in params]
        case = compare(engine, f"auto, {name}", texts, drafting, plain(engine, texts, params))
        found["cases"].append(case.to_dict())
        rates, decided = {"off": list[float](), "auto": list[float]()}, Counter[str]()
        for turn in range(TURNS):
            for way, row in rates.items():
                asked = [replace(each, speculation=way, cache_salt=f"{way} {turn}") for each in params]
                begun = time.perf_counter()
                results = engine.generate(texts, asked)
                row.append(round(len(texts) * TOKENS / (time.perf_counter() - begun), 1))
                for each in results:
                    decided.update(each.metrics.speculative_decoding.decisions)
        pairs = zip(rates["auto"][1:], rates["off"][1:], strict=True)
        ratio = round(statistics.median(auto / off for auto, off in pairs), 3)
        found["rates"][name] = rates | {"ratio": ratio, "decisions": dict(decided)}


def main() -> None:
    """Measure one bundle at each batch size, and write or print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--batches", default="1,4", help="sequences at a time")
    parser.add_argument("--code", action="store_true", help="pycode's prompts, which the reference pair knows")
    parser.add_argument("--out", type=Path, help="file for the result")
    given = parser.parse_args()
    asked = prompts()[: len(PROMPTS)] if given.code else PROMPTS
    result: dict[str, Any] = {"machine": machine(), "bundle": given.bundle.name, "prompts": asked}
    device = False
    for batch, resident in itertools.product(map(int, given.batches.split(",")), (False, True)):
        if resident and not device:
            continue
        with Engine.load(given.bundle, batch_size=batch, prefix_caching=False, resident=resident) as engine:
            device, texts = isinstance(engine._loop, DeviceLoop), [engine.tokenizer.encode(text) for text in asked]
            if "first_token_ms" not in result:
                short = SamplingParams(max_new_tokens=1, seed=0, speculation="off")
                seen = [engine.generate([texts[0]], short)[0].metrics for _ in range(TURNS + 1)][1:]
                first = round(statistics.median((each.ttft - each.queue_time) * 1e3 for each in seen), 3)
                result["first_token_ms"] = {"first prompt": first, "512 tokens": first_token(engine, texts, TURNS)}
            measure(engine, texts, result.setdefault(f"batch {batch}{', resident' if resident else ''}", {}))
        if given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
