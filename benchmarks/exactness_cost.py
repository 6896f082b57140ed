"""What exactness costs: decoding speed of this specbuild and of one before it had exactness classes, in turns.

python benchmarks/exactness_cost.py BUNDLE --old PYTHON --old-bundle OTHER [--prompts FILE] [--turns 7] --out FILE

PYTHON is that of an environment with the old specbuild. OTHER is a bundle that it reads, of the same model;
it gets a copy without the classes in its manifest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NEW_TOKENS = 64
WAYS = ("off", "auto")
Found = dict[str, dict[str, float]]  # by kind of prompt


def without_classes(bundle: Path, folder: Path) -> Path:
    """A copy as the old specbuild would have built it; large files are linked where they can be."""
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
    (copied / "manifest.json").unlink()  # a link to the bundle's own
    (copied / "manifest.json").write_text(json.dumps(manifest))
    return copied


def decode(bundle: Path, prompts: Path, speculation: str) -> Found:
    """Speed and tokens a round; runs in either specbuild, in a process of its own."""
    from specbuild.runtime import Chat, Engine, SamplingParams

    kinds: dict[str, list[Any]] = {}
    found: Found = {}
    with Engine.load(bundle, prefix_caching=False) as engine:
        for each in map(json.loads, prompts.read_text().splitlines()):
            text = each["prompt"]
            asked = Chat([{"role": "user", "content": text}]) if engine.manifest.chat_template else text
            kinds.setdefault(each["kind"], []).append(asked)
        for kind, asked in [("warm-up", next(iter(kinds.values()))[:1]), *kinds.items()]:
            params = [
                SamplingParams(NEW_TOKENS, seed=i, speculation=speculation, ignore_eos=True) for i in range(len(asked))
            ]
            before = engine.stats
            results = engine.generate(asked, params)
            tokens = sum(len(result.token_ids) for result in results)
            seconds = sum(result.metrics.finished - result.metrics.first_token for result in results)
            rounds = engine.stats.since(before).rounds
            found[kind] = {"tokens_per_second": (tokens - len(results)) / seconds, "tokens_per_round": tokens / rounds}
    return found


def ratios(results: dict[tuple[str, str], list[Found]]) -> dict[str, Any]:
    """Medians of what was measured, and of ratios within a turn, by kind."""
    pairs = {
        "off, new/old": (("new", "off"), ("old", "off")),
        "auto, new/old": (("new", "auto"), ("old", "auto")),
        "new auto/old off": (("new", "auto"), ("old", "off")),
    }
    found: dict[str, Any] = {}
    for kind in list(results["new", "off"][0])[1:]:
        row = found[kind] = {
            f"{who} {way} {name}": round(statistics.median(each[kind][name] for each in measured), 3)
            for (who, way), measured in results.items()
            for name in ("tokens_per_second", "tokens_per_round")
        }
        for name, (one, other) in pairs.items():
            turns = zip(results[one], results[other], strict=True)
            row[name] = round(
                statistics.median(a[kind]["tokens_per_second"] / b[kind]["tokens_per_second"] for a, b in turns), 3
            )
    return found


def main() -> None:
    """Run both in turns, and write what came out."""
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
        print(json.dumps(decode(options.bundle, options.prompts, options.decode)))
        return
    if not (options.old and options.old_bundle and options.out):
        parser.error("--old, --old-bundle and --out are needed")
    results: dict[tuple[str, str], list[Found]] = {}
    with tempfile.TemporaryDirectory(dir=options.bundle.resolve().parent) as folder:
        contenders = [("old", options.old, without_classes(options.old_bundle, Path(folder)))]
        contenders.append(("new", sys.executable, options.bundle))
        for turn in range(options.turns):
            for way in WAYS:
                for who, python, bundle in contenders if turn % 2 == 0 else contenders[::-1]:
                    command = [python, __file__, str(bundle), "--decode", way, "--prompts", str(options.prompts)]
                    made = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    results.setdefault((who, way), []).append(json.loads(made.stdout))
    found = {"bundle": options.bundle.name, "turns": options.turns, "kinds": ratios(results)}
    options.out.write_text(json.dumps(found | {"command": sys.argv}, indent=2) + "\n")


if __name__ == "__main__":
    main()
