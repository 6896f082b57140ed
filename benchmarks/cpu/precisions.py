"""Compare plain decoding of several bundles of one model, prompt by prompt in turns.

python -m benchmarks.cpu.precisions BUNDLE OTHER … [--turns 3] [--out FILE]

Each bundle decodes 64 tokens of each prompt in `tests/data/kinds.jsonl`, alone, without drafts. A bundle's result is
its median tokens a second, and how many times faster it is than the first bundle: the geometric mean over prompts, with
its 95 % interval. All other engines' threads have fallen asleep before each text.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from pathlib import Path

from benchmarks.common import OUT, chats, interval, machine, parser, save
from benchmarks.cpu.pairs import NEW_TOKENS, awake
from specbuild.runtime import Chat, Engine, SamplingParams


def speed(engine: Engine, prompt: str) -> float:
    """Return the tokens a second of plain decoding after a prompt's first token."""
    given = Chat([{"role": "user", "content": prompt}]) if engine.manifest.chat_template else prompt
    awake(engine, [prompt], SamplingParams(ignore_eos=True, speculation="off"))
    (result,) = engine.generate([given], SamplingParams(NEW_TOKENS, ignore_eos=True, speculation="off"))
    assert result.metrics
    assert result.metrics.tpot
    return 1 / result.metrics.tpot


def main() -> None:
    """Run the turns, and write and print each bundle's row."""
    options = parser(__doc__, OUT / "precisions.json")
    options.add_argument("bundles", type=Path, nargs="+")
    options.add_argument("--turns", type=int, default=3)
    given, found = options.parse_args(), list[list[float]]()
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine.load(path, prefix_caching=False)) for path in given.bundles]
        for number, prompt in enumerate(chats() * given.turns):
            order = [(number + at) % len(engines) for at in range(len(engines))]
            seen = {at: speed(engines[at], prompt) for at in order}
            found.append([seen[at] for at in range(len(engines))])
    rows = {}
    for at, path in enumerate(given.bundles):
        ratios = [[each[at] / each[0]] for each in found]
        faster = [statistics.geometric_mean(each[0] for each in ratios), *interval(ratios)]
        rows[path.name] = {"tokens_per_second": statistics.median(each[at] for each in found), "faster": faster}
    print(save(given.out, {"machine": machine(), "prompts": len(found), "bundles": rows}))


if __name__ == "__main__":
    main()
