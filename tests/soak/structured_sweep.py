"""Check a bundle's structured outputs against their schemas and plain decoding; a stopped sweep can be resumed.

PYTHONPATH=.:tests/support python tests/soak/structured_sweep.py smollm2.bundle --out benchmarks/results/structured.json

Each row of the set is decoded at temperature 0 and 1, with speculation and without, alone and in batches of four. At
each temperature all four texts must have the same tokens; a finished text must validate by jsonschema, and a new
matcher must accept its tokens.
"""

import json
import sys
import time
from importlib.metadata import version
from itertools import product
from pathlib import Path

from structured_set import SET, check, check_tokens, outputs, rows

from benchmarks.common import machine, parser, save
from specbuild import Engine, SamplingParams

TEMPERATURES, SPECULATION, BATCHES = (0, 1), ("auto", "off"), (1, 4)


def main():
    """Decode the missing rows and write a summary of all rows so far; return 1 if any failed."""
    asked = parser(__doc__, None)
    asked.add_argument("bundle", type=Path)
    asked.add_argument("--set", type=Path, default=SET)
    asked.add_argument("--max-new-tokens", type=int, default=256)
    asked.add_argument("--every", type=int, default=1, help="take each N-th row only")
    asked.add_argument("--minutes", type=float, default=1e9, help="stop after so many, to go on later")
    options = asked.parse_args()
    log = Path("build") / f"{options.out.stem}.progress.jsonl"
    until = time.monotonic() + 60 * options.minutes
    done = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    known = {told["row"] for told in done}
    missing = [(n, row) for n, row in enumerate(rows(options.set)) if n % options.every == 0 and n not in known]
    missing.sort(key=lambda each: each[0] % 8)  # so that a stopped sweep has rows of all kinds
    with Engine.load(options.bundle) as one, Engine.load(options.bundle, batch_size=4) as four:
        for start in range(0, len(missing), 8):
            part = missing[start : start + 8]
            if time.monotonic() > until:
                break
            found = decoded({1: one, 4: four}, part, options.max_new_tokens)
            done += found
            with log.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(told) + "\n" for told in found)
    summary = told_of(done) | {"max_new_tokens": options.max_new_tokens, "bundle": options.bundle.name}
    summary |= {"of": len(rows(options.set)), "llguidance": version("llguidance"), "machine": machine()}
    print(save(options.out, summary))
    return int(bool(summary["failed"]))


def decoded(engines, part, most):
    """Decode some rows in every way; return their finished texts, tokens and failures.

    Args:
        engines: The engine of each batch size.
        part: The rows and their numbers.
        most: The maximum number of new tokens.
    """
    found = {number: {"row": number, "name": row["name"], "finished": [], "failed": []} for number, row in part}
    for temperature in TEMPERATURES:
        first = {}
        for speculation, batch in product(SPECULATION, BATCHES):
            engine, params, prompts = engines[batch], [], []
            for number, row in part:
                how = {"temperature": temperature, "seed": number, "speculation": speculation}
                params.append(SamplingParams(most, structured_outputs=outputs(row), **how))
                asked = f"Give one realistic example of a {row['name'].replace('.', ' ')}. Answer with nothing else."
                prompts.append(
                    [{"role": "user", "content": asked}] if engine.manifest.chat_template else f"# {asked}\n"
                )
            for (number, row), result in zip(part, engine.generate(prompts, params, errors="return"), strict=True):
                told, where = found[number], f"temperature {temperature}, {speculation}, batch {batch}"
                if result.error:
                    told["failed"].append(f"{where}: {result.error}")
                if first.setdefault(number, result.token_ids) != result.token_ids:
                    told["failed"].append(f"{where}: other tokens")
                if (speculation, batch) == ("auto", 1):
                    told["finished"].append(result.finish_reason == "stop")
                    told.setdefault("tokens", []).append(len(result.token_ids))
                    told["failed"] += problems(engine, row, result)
    return list(found.values())


def problems(engine, row, result):
    """Return why a text is not what was asked for; no entries if it is."""
    try:
        vocabulary = engine.manifest.models["target"].vocab_size
        check_tokens(engine.constraint(outputs(row)), result.token_ids, vocabulary)
        if result.finish_reason == "stop":
            check(row, result.text)
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:200]}"]
    return []


def told_of(done):
    """Return the counts over all rows, and those that failed."""
    ended = {t: sum(told["finished"][place] for told in done) for place, t in enumerate(TEMPERATURES)}
    return {
        "rows": len(done),
        "texts": len(done) * len(TEMPERATURES) * len(SPECULATION) * len(BATCHES),
        "tokens": sum(sum(told.get("tokens", [])) for told in done),
        "finished": {f"temperature {t}": f"{count} of {len(done)}" for t, count in ended.items()},
        "failed": [{"name": told["name"], "failed": told["failed"]} for told in done if told["failed"]],
        "not_finished_greedy": [told["name"] for told in done if not told["finished"][0]],
    }


if __name__ == "__main__":
    sys.exit(main())
