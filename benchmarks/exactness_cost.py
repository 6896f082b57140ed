"""Measure what exactness costs: decoding speed of this specbuild and of one without exactness classes, in turns.

python benchmarks/exactness_cost.py BUNDLE --old PYTHON --old-bundle OTHER [--prompts FILE] [--turns 7] --out FILE

PYTHON is the interpreter of an environment with the old specbuild. OTHER is a bundle of the same model that it can
read; it gets a copy without the classes in the manifest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

NEW_TOKENS = 64
WARM_UP = "Which birds fly south in autumn, and which stay?"
WAYS = ("off", "auto")
Who = tuple[str, str]  # "old" or "new", and a way
PAIRS: dict[str, tuple[Who, Who]] = {
    "off, new/old": (("new", "off"), ("old", "off")),
    "auto, new/old": (("new", "auto"), ("old", "auto")),
    "new auto/old off": (("new", "auto"), ("old", "off")),
}


class Took(NamedTuple):
    """Tokens, seconds and rounds of one prompt after its first token."""

    tokens: int
    seconds: float
    rounds: int


def without_classes(bundle: Path, folder: Path) -> Path:
    """Return a copy as the old specbuild would have built it; files are linked if possible."""
    copied = folder / bundle.name
    try:
        shutil.copytree(bundle, copied, copy_function=os.link)
    except OSError:
        shutil.copytree(bundle, copied, dirs_exist_ok=True)
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest.pop("exactness", None)
    manifest.pop("digest", None)
    text = json.dumps(manifest, sort_keys=True, ensure_ascii=False)
    manifest["digest"] = hashlib.sha256(text.encode()).hexdigest()
    (copied / "manifest.json").unlink()  # it may be a link to the bundle's own
    (copied / "manifest.json").write_text(json.dumps(manifest))
    return copied


def decode(bundle: Path, speculation: str) -> None:
    """Decode the prompt in each line of stdin and print tokens, seconds and rounds; runs with either specbuild."""
    from specbuild.runtime import Chat, Engine, SamplingParams

    with Engine.load(bundle, prefix_caching=False) as engine:
        for seed, line in enumerate(sys.stdin):
            text = json.loads(line)
            asked = Chat([{"role": "user", "content": text}]) if engine.manifest.chat_template else text
            params = SamplingParams(NEW_TOKENS, seed=seed, speculation=speculation, ignore_eos=True)
            before = engine.stats
            (result,) = engine.generate([asked], [params])
            rounds = engine.stats.since(before).rounds
            seconds = result.metrics.finished - result.metrics.first_token
            print(json.dumps([len(result.token_ids) - 1, seconds, rounds]), flush=True)


class Contender:
    """A process of one specbuild that decodes prompts in one way."""

    def __init__(self, python: str, bundle: Path, way: str) -> None:
        command = [python, __file__, str(bundle), "--decode", way]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def took(self, text: str) -> Took:
        """Decode one prompt and return what it took."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(text), file=self._process.stdin, flush=True)
        return Took(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def turn(contenders: dict[Who, tuple[str, Path]], prompts: list[dict[str, str]], number: int) -> list[dict[Who, Took]]:
    """Decode every prompt by all contenders in rotating order, in new processes, which remember no earlier turn."""
    running = {who: Contender(python, bundle, who[1]) for who, (python, bundle) in contenders.items()}
    for one in running.values():
        one.took(WARM_UP)  # not one of the prompts, whose answer would then be drafted from memory
    order = list(running)
    found = []
    for index, prompt in enumerate(prompts):
        turned = (number + index) % len(order)
        found.append({who: running[who].took(prompt["prompt"]) for who in order[turned:] + order[:turned]})
    for one in running.values():
        one.close()
    return found


def ratios(measured: list[dict[Who, Took]]) -> dict[str, Any]:
    """Return median speeds, tokens per round, and mean speed ratios on the same prompts with 95 % intervals."""
    row: dict[str, Any] = {}
    for who in measured[0]:
        mine = [each[who] for each in measured]
        row[f"{' '.join(who)} tokens_per_second"] = round(statistics.median(t.tokens / t.seconds for t in mine), 2)
        row[f"{' '.join(who)} tokens_per_round"] = round(sum(t.tokens for t in mine) / sum(t.rounds for t in mine), 3)
    for name, (one, other) in PAIRS.items():
        logs = [math.log(each[other].seconds / each[one].seconds) for each in measured]
        middle, half = statistics.mean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
        row[name] = [round(math.exp(x), 3) for x in (middle, middle - half, middle + half)]
    return row


def main() -> None:
    """Run both specbuilds in turns, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--old", help="the old specbuild's Python")
    parser.add_argument("--old-bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path("tests/data/kinds.jsonl"))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--decode", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.decode:
        decode(options.bundle, options.decode)
        return
    if not (options.old and options.old_bundle and options.out):
        parser.error("--old, --old-bundle and --out are needed")
    from common import machine  # it needs this specbuild; the old one runs `decode` only

    prompts = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    kinds: dict[str, list[dict[Who, Took]]] = {}
    with tempfile.TemporaryDirectory(dir=options.bundle.resolve().parent) as folder:
        old, new = (options.old, without_classes(options.old_bundle, Path(folder))), (sys.executable, options.bundle)
        contenders: dict[Who, tuple[str, Path]] = {(n, way): c for n, c in (("old", old), ("new", new)) for way in WAYS}
        for number in range(options.turns):
            for prompt, took in zip(prompts, turn(contenders, prompts, number), strict=True):
                kinds.setdefault(prompt["kind"], []).append(took)
            found = {
                "bundle": options.bundle.name,
                "turns": number + 1,
                "machine": machine(),
                "kinds": {kind: ratios(each) for kind, each in kinds.items()},
                "all": ratios([one for each in kinds.values() for one in each]),
            }
            options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
