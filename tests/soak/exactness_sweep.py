"""Check that a seed gives one text: compare every way of decoding a bundle with plain decoding, and count differences.

PYTHONPATH=. python tests/soak/exactness_sweep.py BUNDLE --prompts FILE … --out FILE [--num-prompts 64]

The expected text is that of plain decoding, one sequence at a time, without a prefix cache. In a run each request draws
its speculation at random, and requests of both temperatures share batches. Runs that are already in the output are
skipped, so a stopped sweep can be resumed. The exit status is 1 if any text differs.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import machine, parser, save
from specbuild.runtime import Bundle, Chat, Engine, LoadOptions, SamplingParams
from specbuild.runtime.backends.cpu.cores import cores
from specbuild.runtime.drafting.model import DrafterName
from specbuild.runtime.requests.prompt_file import read

TEMPERATURES = (0.0, 0.8)
WAYS = ("off", "auto", "chain:4", "best:16")
PLACES = ((1, True, 1), (4, False, 1), (4, True, 2))  # batch size, prefix cache, repetitions of all requests
TOLD = ("num_spec_steps", "num_accepted_draft_tokens")
Texts = list[list[int]]


@dataclass(frozen=True)
class Run:
    """A way of decoding every prompt at every temperature.

    again: repetitions, each in another random order and with other draws. drafter: None for all that the bundle has.
    speculation: None for a random one of WAYS for each request.
    """

    threads: int
    batch_size: int = 1
    prefix_caching: bool = False
    again: int = 1
    drafter: DrafterName | None = None
    speculation: str | None = "off"

    def key(self):
        """Return the run's name in the output."""
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


def runs(threads, drafts):
    """Yield every run; those with the same threads, which share expected texts, follow each other."""
    drafters = (None, "model", "ngram") if drafts else (None,)
    for number, drafter, (size, prefixes, again) in itertools.product(threads, drafters, PLACES):
        yield Run(number, size, prefixes, again, drafter, None)


def decode(bundle, prompts, run, new_tokens):
    """Return each request's tokens for each repetition, and the sums of the metrics in TOLD."""
    asked = list(itertools.product(TEMPERATURES, range(len(prompts))))
    found, told = [Texts() for _ in asked], dict.fromkeys(TOLD, 0)
    options = LoadOptions(
        batch_size=run.batch_size, threads=run.threads, drafter=run.drafter, prefix_caching=run.prefix_caching
    )
    with Engine.load(bundle, options) as engine:
        for turn in range(run.again):
            mixed = random.Random(f"{run.key()} {turn}")
            order = mixed.sample(range(len(asked)), len(asked))
            params = [
                SamplingParams(new_tokens, temperature=t, seed=i, speculation=run.speculation or mixed.choice(WAYS))
                for t, i in (asked[index] for index in order)
            ]
            results = engine.generate([prompts[asked[index][1]] for index in order], params)
            for index, result in zip(order, results, strict=True):
                if result.error:
                    raise result.error
                found[index].append(result.token_ids)
                for name in told:
                    told[name] += getattr(result.metrics.speculative_decoding, name) if result.metrics else 0
    return found, told


def main():
    """Run what is not yet in the output; return the exit status."""
    asked = parser(__doc__, None)
    asked.add_argument("bundle", type=Path)
    asked.add_argument("--prompts", type=Path, action="append", required=True)
    asked.add_argument("--num-prompts", type=int, default=64)
    asked.add_argument("--max-new-tokens", type=int, default=64)
    asked.add_argument("--threads", type=int, action="append")
    options = asked.parse_args()
    manifest = Bundle.open(options.bundle).manifest
    listed = [each.prompt for file in options.prompts for each in read(str(file), {})]
    listed = [listed[i * len(listed) // options.num_prompts] for i in range(min(options.num_prompts, len(listed)))]
    if manifest.chat_template:
        listed = [Chat([{"role": "user", "content": each}]) if isinstance(each, str) else each for each in listed]
    result = json.loads(options.out.read_text()) if options.out.exists() else {"runs": {}}
    result |= {"precision": manifest.precision, "bound": manifest.exactness_bound, "prompts": len(listed)}
    result["max_new_tokens"] = options.max_new_tokens
    result["machine"] = machine()
    expected = {}
    for run in runs(options.threads or [cores(), 1], "draft" in manifest.models):
        if run.key() in result["runs"]:
            continue
        if run.threads not in expected:
            expected[run.threads] = decode(options.bundle, listed, Run(run.threads), options.max_new_tokens)[0]
        texts, told = decode(options.bundle, listed, run, options.max_new_tokens)
        pairs = [(one, want) for each, (want,) in zip(texts, expected[run.threads], strict=True) for one in each]
        differing = sum(one != want for one, want in pairs)
        found = {"texts": len(pairs), "differing": differing, "tokens": sum(len(one) for one, _ in pairs), **told}
        result["runs"][run.key()] = found
        save(options.out, result)
        print(f"{differing} of {len(pairs)} differ: {run.key()}", flush=True)
    return int(any(each["differing"] for each in result["runs"].values()))


if __name__ == "__main__":
    sys.exit(main())
