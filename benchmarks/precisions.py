"""Compare plain decoding of several bundles of one model, prompt by prompt in turns.

python benchmarks/precisions.py BUNDLE OTHER … [--turns 3] [--out FILE]

Each bundle decodes 64 tokens of each prompt in `tests/data/kinds.jsonl`, alone, without drafts. A bundle's result is
its median tokens a second, and how many times faster it is than the first bundle: the geometric mean over prompts, with
its 95 % interval. All other engines' threads have fallen asleep before each text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from contextlib import ExitStack
from pathlib import Path

from cells import NEW_TOKENS, asked_of, awake, interval
from common import machine

from specbuild.runtime import Chat, Engine, SamplingParams


def speed(engine: Engine, prompt: str) -> float:
    """Return the tokens a second of plain decoding after a prompt's first token."""
    asked = Chat([{"role": "user", "content": prompt}]) if engine.manifest.chat_template else prompt
    awake(engine, [prompt], SamplingParams(ignore_eos=True, speculation="off"))
    (result,) = engine.generate([asked], SamplingParams(NEW_TOKENS, ignore_eos=True, speculation="off"))
    assert result.metrics
    return (NEW_TOKENS - 1) / (result.metrics.finished - result.metrics.first_token)


def main() -> None:
    """Run the turns, print each bundle's result, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked, found = parser.parse_args(), list[list[float]]()
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine.load(path, prefix_caching=False)) for path in asked.bundles]
        for number, prompt in enumerate(asked_of("chat") * asked.turns):
            order = [(number + at) % len(engines) for at in range(len(engines))]
            seen = {at: speed(engines[at], prompt) for at in order}
            found.append([seen[at] for at in range(len(engines))])
    result = {"machine": machine(), "prompts": len(found), "bundles": {}}
    for at, path in enumerate(asked.bundles):
        ratios = [[each[at] / each[0]] for each in found]
        told = {"tokens_per_second": round(statistics.median(each[at] for each in found), 2)}
        mean = statistics.geometric_mean(itertools.chain(*ratios))
        told |= {"faster": [round(each, 3) for each in (mean, *interval(ratios))]}
        result["bundles"][path.name] = told
        print(path.name, json.dumps(told))
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
