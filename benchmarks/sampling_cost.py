"""Measure the cost of sampling: a sampled token against a greedy one, and how much of a draft's speedup remains.

python benchmarks/sampling_cost.py BUNDLE… [--old PYTHON] [--drafts BUNDLE…] [--turns 3] --out FILE

PYTHON is the interpreter of an environment with an old specbuild, which gets the same bundles. Within a process the
ways take turns prompt by prompt, so a ratio compares two texts decoded one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NEW_TOKENS = 32
PROMPTS = Path(__file__).resolve().parent.parent / "tests" / "data" / "kinds.jsonl"
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "repetition penalty 1.1": {"temperature": 0.8, "repetition_penalty": 1.1},
}
Measured = dict[str, list[dict[str, Any]]]  # by way, a row for each text


def decode(bundle: Path, drafts: bool, turns: int, number: int) -> Measured:
    """Decode prompts in every way; return seconds per token, round times and tokens of each text.

    It runs in a process of its own, with either specbuild.

    Args:
        bundle: The bundle.
        drafts: Whether the draft model is compared with plain decoding, else the ways of sampling with each other.
        turns: Turns after a warm-up.
        number: The number of prompts.
    """
    from specbuild.runtime import Chat, Engine, SamplingParams

    lines = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    texts = lines[:: max(1, len(lines) // number)][:number]
    ways = {name: (given, "off") for name, given in WAYS.items()}
    if drafts:
        ways = {f"{name}, {s}": (WAYS[name], s) for name in ("greedy", "temperature 0.8") for s in ("off", "auto")}
    found: Measured = {name: [] for name in ways}
    with Engine.load(bundle, **({"drafter": "model"} if drafts else {})) as engine:
        for turn in range(turns + 1):
            for i, text in enumerate(texts if turn else texts[:1]):
                asked = Chat([{"role": "user", "content": text}]) if engine.manifest.chat_template else text
                for name, (given, speculation) in ways.items():
                    params = SamplingParams(NEW_TOKENS, seed=i, speculation=speculation, ignore_eos=True, **given)
                    before, rounds, tokens = engine.stats, list[tuple[float, float]](), list[int]()
                    for chunk in engine.stream([asked], [params]):
                        done, before = engine.stats.since(before), engine.stats
                        if done.rounds and tokens:  # not the prompt's rounds
                            rounds.append((done.total / done.rounds, done.accept / done.rounds))
                        tokens += chunk.token_ids
                        result = chunk.result
                    seconds = (result.metrics.finished - result.metrics.first_token) / (len(tokens) - 1)
                    row = {"token": seconds, "rounds": rounds, "tokens": tokens}
                    if turn:  # the first is a warm-up
                        found[name].append(row)
        if not drafts:
            tokens = engine.tokenizer.encode(texts[0])
            rows = [engine.logits(tokens[: count + 1]) for count in range(min(8, len(tokens)))]
            for name, (given, _) in ways.items():
                found[name][0]["alone"] = alone(SamplingParams(**given), tokens, rows)
    return found


def alone(params: Any, tokens: list[int], rows: list[Any]) -> float:
    """Return the seconds of choosing a token alone: the first decile over many positions."""
    from specbuild.runtime.sampling.sampler import Sampler

    sampler, times = Sampler(params, 1, tokens, len(rows[0])), []
    for position in range(160):
        began = time.perf_counter()
        sampler.choose(rows[position % len(rows)], position, ())
        times.append(time.perf_counter() - began)
        sampler.emit(tokens[0], position + 1)
    return statistics.quantiles(times, n=10)[0]


def plain(old: list[Measured], new: list[Measured]) -> dict[str, Any]:
    """Return each way's cost of a token over a greedy one: by medians of text pairs, and by first deciles of rounds.

    The first decile suffers less from other load on the machine, and the choice alone, compared with the quickest round
    of all, hardly at all. `accept`: the part of a round that chooses its token.
    """
    found: dict[str, Any] = {name: {} for name in WAYS}
    for who, runs in (("old", old), ("new", new)):
        if not runs:
            continue
        rounds = {name: [each for run in runs for text in run[name] for each in text["rounds"]] for name in WAYS}
        total, accept = (
            {name: statistics.quantiles([each[part] for each in of], n=10)[0] for name, of in rounds.items()}
            for part in (0, 1)
        )
        for name, row in found.items():
            texts = [(each, greedy) for run in runs for each, greedy in zip(run[name], run["greedy"], strict=True)]
            ratio = statistics.median(each["token"] / greedy["token"] for each, greedy in texts)
            more = accept[name] - accept["greedy"]
            choice, greedy_choice = (min(run[each][0]["alone"] for run in runs) for each in (name, "greedy"))
            quickest = min(seconds for seconds, _ in rounds["greedy"])
            row[who] = {
                "texts over greedy": round(ratio, 3),
                "rounds over greedy": round(total[name] / total["greedy"], 3),
                "accepting over greedy rounds": round(1 + more / total["greedy"], 3),
                "round ms": round(1e3 * total[name], 3),
                "accept us": round(1e6 * accept[name], 1),
                "choice alone us": round(1e6 * choice, 1),
                "quickest greedy round ms": round(1e3 * quickest, 3),
                "choice alone over quickest greedy round": round(1 + (choice - greedy_choice) / quickest, 3),
            }
    return found


def kept(runs: list[Measured]) -> dict[str, float]:
    """Return the speedup of `auto` by temperature, and the sampled one as a share of the greedy one."""
    found = {}
    for name in ("greedy", "temperature 0.8"):
        pairs = [zip(run[f"{name}, off"], run[f"{name}, auto"], strict=True) for run in runs]
        found[name] = statistics.median(off["token"] / auto["token"] for pair in pairs for off, auto in pair)
    found["kept"] = found["temperature 0.8"] / found["greedy"]
    return {name: round(value, 3) for name, value in found.items()}


def differing(old: list[Measured], new: list[Measured]) -> int:
    """Return how many texts have other tokens in the new specbuild than in the old one."""
    pairs = [(a[name], b[name]) for a, b in zip(old, new, strict=True) for name in a]
    return sum(x["tokens"] != y["tokens"] for one, other in pairs for x, y in zip(one, other, strict=True))


def summary(kind: str, old: list[Measured], new: list[Measured]) -> dict[str, Any]:
    """Summarize one bundle, decoded plainly or with drafts."""
    found: dict[str, Any] = {"turns": len(new)} | ({"differing texts": differing(old, new)} if old else {})
    if kind == "plain":
        return found | {"ways": plain(old, new)}
    return found | {who: kept(runs) for who, runs in (("old", old), ("new", new)) if runs}


def main() -> None:
    """Run the specbuilds in turns, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", type=Path, nargs="*", metavar="BUNDLE")
    parser.add_argument("--old", help="the old specbuild's Python")
    parser.add_argument("--drafts", type=Path, nargs="*", default=[], metavar="BUNDLE", help="with a draft model")
    parser.add_argument("--turns", type=int, default=3, help="processes of each")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file; what is in it of other bundles stays")
    parser.add_argument("--decode", choices=("plain", "drafts"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.decode:
        print(json.dumps(decode(options.bundles[0], options.decode == "drafts", 1, options.prompts)))
        return
    if not options.out:
        parser.error("--out is needed")
    found = json.loads(options.out.read_text()) if options.out.exists() else {"plain": {}, "drafts": {}}
    for kind, bundles in (("plain", options.bundles), ("drafts", options.drafts)):
        for bundle in bundles:
            results: dict[str, list[Measured]] = {"old": [], "new": []}
            contenders = [(who, python) for who, python in (("old", options.old), ("new", sys.executable)) if python]
            for turn in range(options.turns):
                for who, python in contenders if turn % 2 == 0 else contenders[::-1]:
                    command = [python, __file__, str(bundle), "--decode", kind, "--prompts", str(options.prompts)]
                    made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    results[who].append(json.loads(made.stdout.splitlines()[-1]))
                row = summary(kind, **results) | {"prompts": options.prompts, "load": os.getloadavg()[0]}
                found[kind][bundle.name] = row
                options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
