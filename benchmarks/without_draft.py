"""Hold a bundle without a draft model against plain decoding: its tokens, and its rates in turns, alone and batched.

python benchmarks/without_draft.py BUNDLE [--batches 1,4] [--out FILE.json]

"auto" drafts from the text itself and from what the model wrote before; a turn of its own salt finds nothing of another
turn. Eight prompts, 96 tokens each, greedy and at temperature 0.8 with seeds. The first turn warms up: it is listed,
and not among those whose ratios' median is `ratio`. For a model that was trained, on any device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engines import machine
from specbuild.measure.exactness import compare, plain
from specbuild.runtime import Engine, SamplingParams

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


def measure(engine: Engine, found: dict[str, Any]) -> None:
    """Fill in `found`: the exactness class, what no graph holds, the comparisons, and the rates of each turn."""
    texts = [engine.tokenizer.encode(text) for text in PROMPTS]
    greedy = [SamplingParams(max_new_tokens=TOKENS, seed=i, ignore_eos=True) for i in range(len(texts))]
    found |= {"class": engine.exact and asdict(engine._loop.exactness), "notes": engine.notes, "cases": [], "rates": {}}
    for name, temperature in ("greedy", 0.0), ("temperature 0.8", 0.8):
        params = [replace(each, temperature=temperature, cache_salt="tokens") for each in greedy]
        drafting = [replace(each, speculation="auto") for each in params]
        case = compare(engine, f"auto, {name}", texts, drafting, plain(engine, texts, params))
        found["cases"].append(case.to_dict())
        rates: dict[str, list[float]] = {"off": [], "auto": []}
        for turn in range(TURNS):
            for way, row in rates.items():
                asked = [replace(each, speculation=way, cache_salt=f"{way} {turn}") for each in params]
                begun = time.perf_counter()
                engine.generate(texts, asked)
                row.append(round(len(texts) * TOKENS / (time.perf_counter() - begun), 1))
        pairs = zip(rates["auto"][1:], rates["off"][1:], strict=True)
        found["rates"][name] = rates | {"ratio": round(statistics.median(auto / off for auto, off in pairs), 3)}


def main() -> None:
    """Measure one bundle at each batch size, and write or print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--batches", default="1,4", help="sequences at a time")
    parser.add_argument("--out", type=Path, help="file for the result")
    given = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "bundle": given.bundle.name, "prompts": PROMPTS}
    for batch in map(int, given.batches.split(",")):
        with Engine.load(given.bundle, batch_size=batch, prefix_caching=False) as engine:
            measure(engine, result.setdefault(f"batch {batch}", {}))
        if given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
