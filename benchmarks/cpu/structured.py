"""Measure structured outputs: the cost of a node's mask, and tokens per second when forced tokens are drafted.

python -m benchmarks.cpu.structured smollm2.bundle [--turns 3] [--out FILE]
"""

from __future__ import annotations

import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import OUT, ROOT, in_turns, machine, parser, save
from specbuild import Engine, SamplingParams, StructuredOutputs
from specbuild.runtime.sampling.grammar import Grammar, GrammarMatcher
from specbuild.runtime.sampling.grammar_process import compiled, grammar_of, tokenizer_of

KEYS = ("customer_account_identifier", "shipping_destination_country", "requested_delivery_window")
MORE = ("preferred_payment_method", "subscription_renewal_status", "marketing_communication_consent")
FORM = {
    "type": "object",
    "properties": {
        KEYS[0]: {"type": "integer", "minimum": 1, "maximum": 99999},
        KEYS[1]: {"enum": ["Germany", "France", "Spain", "Portugal"]},
        KEYS[2]: {"enum": ["morning", "afternoon", "evening"]},
        MORE[0]: {"enum": ["credit_card", "bank_transfer", "invoice"]},
        MORE[1]: {"type": "boolean"},
        MORE[2]: {"type": "boolean"},
    },
    "required": [*KEYS, *MORE],
    "additionalProperties": False,
}
CHATS = [f"Fill in the customer form as JSON for a customer from {land}." for land in ("Spain", "Germany")]
LARGE = 262_144


def widened(tokenizer: dict[str, Any], size: int) -> dict[str, Any]:
    """Widen a tokenizer.json to about `size` tokens; added ones are pairs of old ones that no merge produces."""
    vocabulary = tokenizer["model"]["vocab"]
    names, place = [*vocabulary], max(vocabulary.values())
    rng = np.random.default_rng(0)
    while len(vocabulary) < size - 64:
        name = "".join(names[int(number)] for number in rng.integers(256, len(names), 2))
        if name not in vocabulary:
            place += 1
            vocabulary[name] = place
    return tokenizer


def masks(content: str, size: int, ends: list[int], sets: list[dict[str, Any]]) -> dict[str, Any]:
    """Measure the milliseconds of computing and applying a node's mask, on random walks through grammars.

    Args:
        content: The tokenizer.json.
        size: The size of the vocabulary.
        ends: The end-of-sequence token ids.
        sets: The fields of each structured output.
    """
    tokenizer, took, applied = tokenizer_of(content, size, ends), list[float](), list[float]()
    for row in sets:
        made = Grammar(compiled(tokenizer, grammar_of(StructuredOutputs(**row).to_dict())), size, ends)
        matcher: GrammarMatcher = made.matcher(size)
        rng, logits = np.random.default_rng(len(took)), np.zeros(size, dtype=np.float32)
        for _ in range(24):
            path = matcher.follow((), (), 3)
            began = time.perf_counter()
            mask = matcher.mask(path)
            took.append(1e3 * (time.perf_counter() - began))
            legal = np.unpackbits(mask.view(np.uint8), count=size, bitorder="little").view(np.bool_)
            began = time.perf_counter()
            np.copyto(logits, -np.inf, where=~legal)
            applied.append(1e3 * (time.perf_counter() - began))
            if not legal.any():
                raise SystemExit(f"{row} came to nothing: {matcher.reason}")
            for token in [*path, int(rng.choice(np.flatnonzero(legal)))]:
                if token in ends:
                    break
                matcher.emit(token)
    return {"vocabulary": size, "nodes": len(took), "mask_ms": spread(took), "apply_ms": spread(applied)}


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, the mean and the 99th percentile."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "mean": statistics.mean(ordered),
        "p99": ordered[99 * len(ordered) // 100],
    }


def speed(engine: Engine, **fields: Any) -> float:
    """Return the tokens per second of all chats, one after another, prefill included."""
    tokens, began = 0, time.perf_counter()
    for number, chat in enumerate(CHATS):
        params = SamplingParams(seed=number, **fields)
        prompt: Any = [{"role": "user", "content": chat}] if engine.manifest.chat_template else chat
        tokens += len(engine.generate([prompt], params)[0].token_ids)
    return tokens / (time.perf_counter() - began)


def main() -> None:
    """Measure, and write and print the rows."""
    options = parser(__doc__, OUT / "structured.json")
    options.add_argument("bundle", type=Path)
    options.add_argument("--turns", type=int, default=3)
    given = options.parse_args()
    lines = (ROOT / "tests" / "data" / "structured.jsonl").read_text(encoding="utf-8").splitlines()
    sets = [{k: v for k, v in json.loads(line).items() if k != "name"} for line in lines[::5]]
    form = {"structured_outputs": StructuredOutputs(json=FORM), "max_new_tokens": 128}
    heats = {"greedy": 0.0, "temperature 1": 1.0}
    with Engine.load(given.bundle) as engine:
        ends, size = list(engine.manifest.eos_token_ids), engine.manifest.models["target"].vocab_size
        ways = {
            f"{name}, {speculation}": partial(speed, engine, **form, temperature=heat, speculation=speculation)
            for name, heat in heats.items()
            for speculation in ("auto", "off")
        }
        rates = {name: statistics.median(each) for name, each in in_turns(ways, given.turns).items()}
        content = engine.tokenizer.to_json()
    large = json.dumps(widened(json.loads(content), LARGE))
    result = {
        "machine": machine(),
        "tokens_per_second": rates,
        "speedup": {name: rates[f"{name}, auto"] / rates[f"{name}, off"] for name in heats},
        "masks": [masks(content, size, ends, sets), masks(large, LARGE, ends, sets)],
    }
    print(save(given.out, result))


if __name__ == "__main__":
    main()
