"""Hold `auto` against plain decoding: tokens, and rates in turns, alone and batched, as loaded and resident.

python -m benchmarks.gpu.auto BUNDLE [--batches 1,4] [--code] [--out FILE]

Eight prompts, 96 tokens each, greedy and at temperature 0.8 with seeds; with --code they are pycode's. A turn of its
own salt finds nothing of another turn. The first turn warms up and does not count; rates are the medians of the others,
and `ratio` is that of their ratios. Also milliseconds to the first token of the first prompt and of one of 512 tokens.
Resident rounds are measured where the bundle's backend has them. For a model that was trained.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common import OUT, in_turns, machine, parser, prompts, save
from benchmarks.gpu.engines import first_token, long_prompt, row_of
from specbuild.measure.exactness import compare, plain
from specbuild.runtime import Engine, SamplingParams
from specbuild.runtime.decoding.device.loop import DeviceLoop

TOKENS, TURNS = 96, 3
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


def rates(engine: Engine, texts: list[list[int]], params: list[SamplingParams]) -> dict[str, Any]:
    """Return the tokens per second of both ways, their ratio, and what `auto` decided in all."""
    turns, decided = itertools.count(), Counter[str]()

    def rate(way: str) -> float:
        salt = f"{way} {next(turns)}"
        begun = time.perf_counter()
        results = engine.generate(texts, [replace(each, speculation=way, cache_salt=salt) for each in params])
        seconds = time.perf_counter() - begun
        for each in results:
            assert each.metrics
            decided.update(each.metrics.speculative_decoding.decisions)
        return len(texts) * TOKENS / seconds

    found = in_turns({"off": lambda: rate("off"), "auto": lambda: rate("auto")}, TURNS)
    ratio = statistics.median(auto / off for auto, off in zip(found["auto"], found["off"], strict=True))
    medians = {way: statistics.median(each) for way, each in found.items()}
    return medians | {"ratio": ratio, "decisions": dict(decided)}


def measure(engine: Engine, texts: list[list[int]]) -> dict[str, Any]:
    """Return the comparison with plain decoding, and the rates by temperature."""
    exactness = getattr(engine._loop, "exactness", None)
    found: dict[str, Any] = {"class": exactness and asdict(exactness), "notes": list(engine.notes)}
    greedy = [SamplingParams(max_new_tokens=TOKENS, seed=i, ignore_eos=True) for i in range(len(texts))]
    for name, temperature in ("greedy", 0.0), ("temperature 0.8", 0.8):
        params = [replace(each, temperature=temperature, cache_salt="tokens") for each in greedy]
        drafting = [replace(each, speculation="auto") for each in params]
        case = compare(engine, name, texts, drafting, plain(engine, texts, params))
        found[name] = row_of([case]) | rates(engine, texts, params)
    return found


def main() -> None:
    """Measure one bundle at each batch size, and write and print the rows."""
    options = parser(__doc__, OUT / "auto.json")
    options.add_argument("bundle", type=Path)
    options.add_argument("--batches", default="1,4", help="sequences at a time")
    options.add_argument("--code", action="store_true", help="pycode's prompts, which the reference pair knows")
    given = options.parse_args()
    asked = prompts()[: len(PROMPTS)] if given.code else PROMPTS
    result: dict[str, Any] = {"machine": machine(), "bundle": given.bundle.name, "first_token_ms": {}}
    device = False
    for batch, resident in itertools.product(map(int, given.batches.split(",")), (False, True)):
        if resident and not device:
            continue
        with Engine.load(given.bundle, batch_size=batch, prefix_caching=False, resident=resident) as engine:
            device, texts = isinstance(engine._loop, DeviceLoop), [engine.tokenizer.encode(text) for text in asked]
            for name, prompt in (("first prompt", texts[0]), ("512 tokens", long_prompt(texts))):
                if name not in result["first_token_ms"]:
                    result["first_token_ms"][name] = first_token(engine, prompt, TURNS)
            result[f"batch {batch}{', resident' if resident else ''}"] = measure(engine, texts)
        save(given.out, result)
    print(save(given.out, result))


if __name__ == "__main__":
    main()
