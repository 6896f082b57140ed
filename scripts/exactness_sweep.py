"""One seed, one text: hold every way of decoding a bundle against plain decoding alone, and write what differed.

python scripts/exactness_sweep.py BUNDLE --prompts FILE --out FILE [--num-prompts 64] [--max-new-tokens 64]

Expected is plain decoding of one sequence at a time, with no prefix cache. A run decodes the prompts with other
threads, batches, trees, drafters, prefix caches or in another order. What is in the output already is not run again,
so a sweep that was stopped goes on. The exit status is 1 where any text differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specbuild.runtime import Bundle, Chat, Engine, SamplingParams
from specbuild.runtime.bundle.atomic_output import write
from specbuild.runtime.requests.prompt_file import read

TEMPERATURES = (0.0, 0.8)
WAYS = (("off", None), ("auto", None), ("chain:4", None), ("best:16", None), ("auto", "ngram"))


@dataclass(frozen=True)
class Run:
    """A way of decoding. `drafter`: None is both. `again`: how often all are asked, each time in another order."""

    temperature: float
    threads: int
    batch_size: int
    speculation: str
    drafter: str | None
    prefix_caching: bool
    again: int = 1

    def key(self) -> str:
        """Its name in the output."""
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


def runs(threads: list[int], batch_sizes: list[int], drafts: bool) -> Iterator[Run]:
    """Every one, those of one engine one after another."""
    ways = WAYS if drafts else [way for way in WAYS if way[1] is None]
    for number, size, (speculation, drafter), prefixes in itertools.product(threads, batch_sizes, ways, (False, True)):
        for temperature in TEMPERATURES:
            yield Run(temperature, number, size, speculation, drafter, prefixes, 2 if prefixes else 1)


def decode(bundle: Path, prompts: list[Any], run: Run, new_tokens: int) -> tuple[list[list[list[int]]], dict[str, int]]:
    """Each prompt's tokens, each time that it was asked, and how often rounds were unsettled and tokens recomputed."""
    found: list[list[list[int]]] = [[] for _ in prompts]
    told = {"num_unsettled_steps": 0, "num_recomputed_tokens": 0, "num_spec_steps": 0}
    load: dict[str, Any] = {"batch_size": run.batch_size, "threads": run.threads, "drafter": run.drafter}
    with Engine.load(bundle, prefix_caching=run.prefix_caching, **load) as engine:
        for turn in range(run.again):
            order = list(range(len(prompts)))
            random.Random(turn).shuffle(order)
            params = [
                SamplingParams(new_tokens, temperature=run.temperature, seed=index, speculation=run.speculation)
                for index in order
            ]
            for index, result in zip(order, engine.generate([prompts[i] for i in order], params), strict=True):
                if result.error:
                    raise result.error
                found[index].append(result.token_ids)
                for name in told:
                    told[name] += getattr(result.metrics.speculative_decoding, name) if result.metrics else 0
    return found, told


def main() -> int:
    """Run what is left to be run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--batch-sizes", default="1,4")
    options = parser.parse_args()
    manifest = Bundle.open(options.bundle).manifest
    listed = [each.prompt for file in options.prompts for each in read(str(file), {})]
    listed = [listed[i * len(listed) // options.num_prompts] for i in range(min(options.num_prompts, len(listed)))]
    if manifest.chat_template:
        listed = [Chat([{"role": "user", "content": each}]) if isinstance(each, str) else each for each in listed]
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"runs": {}}
    result |= {"precision": manifest.precision, "bound": manifest.exactness_bound, "prompts": len(listed)}
    result |= {"classes": [asdict(each) for each in manifest.exactness], "max_new_tokens": options.max_new_tokens}
    expected: dict[tuple[float, int], list[list[list[int]]]] = {}
    threads, sizes = ([int(number) for number in text.split(",")] for text in (options.threads, options.batch_sizes))
    for run in runs(threads, sizes, "draft" in manifest.models):
        if run.key() in result["runs"]:
            continue
        which = run.temperature, run.threads
        if which not in expected:
            alone = replace(run, batch_size=1, speculation="off", drafter=None, prefix_caching=False, again=1)
            expected[which] = decode(options.bundle, listed, alone, options.max_new_tokens)[0]
        texts, told = decode(options.bundle, listed, run, options.max_new_tokens)
        pairs = [(one, want) for each, (want,) in zip(texts, expected[which], strict=True) for one in each]
        differing = sum(one != want for one, want in pairs)
        result["runs"][run.key()] = {"texts": len(pairs), "tokens": sum(map(len, itertools.chain(*texts))), **told}
        result["runs"][run.key()]["differing"] = differing
        write(options.out, (json.dumps(result, indent=2) + "\n").encode())
        print(f"{differing} of {len(pairs)} differ: {run.key()}", flush=True)
    return int(any(each["differing"] for each in result["runs"].values()))


if __name__ == "__main__":
    sys.exit(main())
