"""Measure gaps between a free text's tokens while hostile structured outputs are compiled.

python benchmarks/hostile_grammars.py smollm2.bundle [--out benchmarks/out]
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from common import machine, parser

from specbuild import Engine, SamplingParams, StructuredOutputs
from specbuild.runtime.errors import SpecbuildError

TOKENS, TURNS = 96, 3
HOSTILE: list[dict[str, Any]] = [
    {"regex": "(a{1,1000}){1,1000}"},
    {"regex": "(a?){5000}a{5000}"},
    {"json": {"allOf": [{"anyOf": [{"const": n * k} for n in range(20)]} for k in range(1, 9)]}},
    {"json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(6000)}}},
    {"choice": [f"{number}{'ab' * 28}" for number in range(4096)]},
]


def gaps(engine: Engine) -> list[float]:
    """Return the milliseconds between a text's tokens."""
    found, last = list[float](), 0.0
    for _ in engine.stream("The sea", SamplingParams(TOKENS, ignore_eos=True, speculation="off")):
        now = time.perf_counter()
        if last:
            found.append(1e3 * (now - last))
        last = now
    return found


def attacked(engine: Engine) -> tuple[list[float], int]:
    """Return the gaps while a thread asks for one hostile structure after another, and how many it asked for."""
    stop, asked = threading.Event(), 0

    def attack() -> None:
        nonlocal asked
        while not stop.is_set():
            for fields in HOSTILE:
                asked += 1
                outputs = StructuredOutputs(**fields, any_whitespace=bool(asked % 2))
                try:
                    engine.constraint(outputs)
                except SpecbuildError:
                    continue

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        return gaps(engine), asked
    finally:
        stop.set()
        thread.join()


def main() -> None:
    """Measure in turns, and write hostile-grammars-cpu.json."""
    options_of = parser((__doc__ or "").splitlines()[0])
    options_of.add_argument("bundle", type=Path)
    options = options_of.parse_args()
    quiet, loud, asked = list[float](), list[float](), 0
    with Engine.load(options.bundle) as engine:
        gaps(engine)
        for _ in range(TURNS):
            quiet += gaps(engine)
            found, count = attacked(engine)
            loud, asked = loud + found, asked + count
    told: dict[str, Any] = {"machine": machine(), "gaps": len(quiet), "asked": asked}
    for name, values in (("alone", quiet), ("attacked", loud)):
        ordered = sorted(values)
        told[name] = {"median_ms": ordered[len(ordered) // 2], "p99_ms": ordered[99 * len(ordered) // 100]}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "hostile-grammars-cpu.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
