"""Record how many nodes the rounds of a real run drafted, and how many were accepted, to be replayed by shape.py.

python -m benchmarks.gpu.rounds BUNDLE [--out FILE]

The bundle is a CPU's of a target with a draft. Ten prompts of kinds.jsonl, 40 tokens each, greedy: by trees of the
draft model, and by lookup, whose rounds draft nothing where the text does not repeat itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from benchmarks.common import chats, parser
from specbuild.runtime import Engine, SamplingParams

ROUNDS = Path(__file__).with_name("rounds.json")
WAYS = {"chain:4": "model", "best:7": "model", "best:15": "model", "lookup": "ngram"}
PROMPTS, TOKENS = 10, 40


class Recorder:
    """A proposer that notes what every round drafted, and how much of it was accepted."""

    def __init__(self, proposer: Any) -> None:
        self._proposer, self.rounds = proposer, list[tuple[int, int]]()

    def commit(self, sequence: Any, proposal: Any, path: Seq[int]) -> None:
        """See `Proposer.commit`."""
        self.rounds.append((len(proposal.tree) - 1, len(path) - 1))
        self._proposer.commit(sequence, proposal, path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)


def record(bundle: Path) -> dict[str, list[tuple[int, int]]]:
    """Return each way's rounds: nodes without the root, and those of them that were accepted."""
    found = {}
    for way, drafter in WAYS.items():
        with Engine.load(bundle, drafter=drafter, prefix_caching=False) as engine:  # type: ignore[arg-type]
            loop: Any = engine._loop
            loop.proposer = recorder = Recorder(loop.proposer)
            tree = "chain:15" if drafter == "ngram" else way
            engine.generate(chats()[:PROMPTS], SamplingParams(max_new_tokens=TOKENS, speculation=tree))
            found[way] = recorder.rounds
    return found


def main() -> None:
    """Record, and write the rounds on one line for each way."""
    options = parser(__doc__, ROUNDS)
    options.add_argument("bundle", type=Path)
    given = options.parse_args()
    with Engine.load(given.bundle) as engine:
        models = {name: Path(each.source).name for name, each in engine.manifest.models.items()}
    lines = ",\n".join(f'"{way}": {json.dumps(rounds)}' for way, rounds in record(given.bundle).items())
    given.out.write_text(f'{{"models": {json.dumps(models)},\n"ways": {{\n{lines}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
